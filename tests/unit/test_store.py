"""A cache root: counted truly, evicted by whole sets in the order of use, never by starting."""

import errno
import json
import os
import time
import tracemalloc

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.objects import ChunkKey, file_name
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.store import Index, Store

LIVE, DEAD = "live-kvp-1", "dead-kvp-2"
SIZE = 8192


def key(number, rank=0, model=LIVE, salt=""):
    return ChunkKey(model, number.to_bytes(32, "big"), rank, 0, salt)


def write(root, chunk, age=0, size=SIZE):
    path = root / file_name(chunk)
    path.write_bytes(b"x" * size)
    os.utime(path, (1000 - age, 1000 - age))


def names(root):
    return {path.name for path in root.iterdir() if path.is_file()}


def opened(root, budget=10**9, free=10**12, **more):
    store = Store(str(root), [LIVE], budget, free_bytes=lambda: free, **more)
    store.scan()
    return store


def stored(store, root, chunk, size=SIZE):
    """As the adapter stores: promise, write, keep."""
    if not store.promise(size, chunk.model_name):
        return False
    write(root, chunk, size=size)
    store.keep(chunk, size, size)
    return True


def test_everything_is_counted_by_class_and_nothing_deleted(tmp_path):
    write(tmp_path, key(1))
    write(tmp_path, key(2, model=DEAD))
    (tmp_path / f"{file_name(key(3))}.tmp.1f").write_bytes(b"x" * 4096)
    (tmp_path / "lmcache-server.pid").write_bytes(b"1")
    (tmp_path / ".kvpersist/quarantine").mkdir(parents=True)
    (tmp_path / ".kvpersist/quarantine/a").write_bytes(b"x" * 4096)
    (tmp_path / ".kvpersist/index").write_bytes(b"x" * 4096)
    (tmp_path / "mine/deep").mkdir(parents=True)
    (tmp_path / "mine/deep/file").write_bytes(b"x" * 4096)
    (tmp_path / "link").symlink_to("/nowhere")
    before = names(tmp_path)
    store = opened(tmp_path, budget=1)  # far above the budget
    usage = store.usage()
    assert (usage.live, usage.dead, usage.temp, usage.quarantine) == (SIZE, SIZE, 4096, 4096)
    assert usage.foreign == 4096 * 3 + (tmp_path / "link").lstat().st_blocks * 512
    assert names(tmp_path) == before
    assert store.has(key(1))
    assert not store.has(key(2, model=DEAD))


def test_the_oldest_leave_first_across_a_restart(tmp_path):
    for number in range(10):
        write(tmp_path, key(number), age=100 - number)
    store = opened(tmp_path, budget=10 * SIZE)
    assert len(names(tmp_path)) == 10
    assert stored(store, tmp_path, key(99))
    left = {number for number in range(10) if store.has(key(number))}
    assert left == set(range(3, 10))  # from above 0.9 down to 0.8, with the new one
    assert names(tmp_path) == {file_name(key(number)) for number in [*left, 99]}


def test_what_is_used_stays(tmp_path):
    for number in range(10):
        write(tmp_path, key(number), age=100 - number)
    store = opened(tmp_path, budget=10 * SIZE)
    assert store.pin(key(0))
    store.unpin(key(0))
    assert stored(store, tmp_path, key(99))
    assert store.has(key(0))
    assert not store.has(key(1))


@pytest.mark.parametrize("share", [1.0, 1.2])
def test_stores_in_parallel_make_room_once(tmp_path, monkeypatch, share):
    """However far above the watermark it starts: room that another store made meanwhile counts."""
    for number in range(1000):
        write(tmp_path, key(number), age=2000 - number, size=4096)
    store = opened(tmp_path, budget=int(1000 * 4096 / share))
    evict, others = store._evict, [4096] * 3

    def interrupted(wanted, scope):
        freed = evict(wanted, scope)
        if others:
            assert store.promise(others.pop(), LIVE)
        return freed

    monkeypatch.setattr(store, "_evict", interrupted)
    assert store.promise(4096, LIVE)
    assert not others
    assert 0.7 * store.budget_bytes <= store.usage().live <= 0.8 * store.budget_bytes


def test_a_disk_that_was_read_only_is_evicted_from_again(tmp_path, monkeypatch):
    for number in range(10):
        write(tmp_path, key(number), age=100 - number)
    store = opened(tmp_path, budget=10 * SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: (_ for _ in ()).throw(OSError(errno.EROFS, "read-only")))
        assert not any(stored(store, tmp_path, key(number)) for number in range(90, 98))
    assert stored(store, tmp_path, key(99))


def test_pinned_sets_are_not_evicted(tmp_path):
    for number in range(5):
        write(tmp_path, key(number), age=100 - number)
    store = opened(tmp_path, budget=5 * SIZE)
    assert all(store.pin(key(number)) for number in range(5))
    assert not stored(store, tmp_path, key(99))
    assert len(names(tmp_path)) == 5
    store.unpin(key(2))
    assert stored(store, tmp_path, key(99))
    assert not store.has(key(2))


def test_whole_sets_leave(tmp_path):
    for number in range(4):
        for rank in range(4):
            write(tmp_path, key(number, rank), age=100 - number - rank / 10)
    store = opened(tmp_path, budget=16 * SIZE)
    assert stored(store, tmp_path, key(99))
    for number in range(4):
        assert len({store.has(key(number, rank)) for rank in range(4)}) == 1
    assert not store.has(key(0))


def test_dead_namespaces_and_foreign_files_are_never_evicted(tmp_path):
    for number in range(9):
        write(tmp_path, key(number, model=DEAD), age=100)
    store = opened(tmp_path, budget=10 * SIZE)
    assert stored(store, tmp_path, key(1))
    assert not stored(store, tmp_path, key(2), size=3 * SIZE)
    assert sum(DEAD in name for name in names(tmp_path)) == 9


def test_the_budget_is_never_passed(tmp_path):
    store = opened(tmp_path, budget=20 * SIZE)
    for number in range(200):
        assert stored(store, tmp_path, key(number))
        assert store.usage().total() <= 20 * SIZE
        assert store.usage().live == len(names(tmp_path)) * SIZE
    reopened = opened(tmp_path, budget=20 * SIZE)
    assert reopened.usage().live == store.usage().live


def test_the_reserve_of_the_disk_counts_too(tmp_path):
    free = [10 * SIZE]
    store = Store(str(tmp_path), [LIVE], 10**12, reserve_bytes=8 * SIZE, free_bytes=lambda: free[0])
    store.scan()
    assert stored(store, tmp_path, key(1))
    free[0] = 8 * SIZE - 1
    assert not stored(store, tmp_path, key(2), size=4 * SIZE)
    free[0] = 100 * SIZE
    assert stored(store, tmp_path, key(3))


def test_promises_in_flight_are_counted(tmp_path):
    store = opened(tmp_path, budget=10 * SIZE, trigger_watermark=1.0)
    assert all(store.promise(SIZE) for _ in range(10))
    assert not store.promise(SIZE)
    store.give_back(SIZE)
    assert store.promise(SIZE)


def test_a_chunk_stored_again_is_counted_once(tmp_path):
    store = opened(tmp_path)
    for size in (SIZE, 2 * SIZE, SIZE):
        assert stored(store, tmp_path, key(1), size=size)
        assert (store.usage().live, store.index.count) == (size, 1)
    store.forget(key(1), to_quarantine=True)
    assert (store.usage().live, store.usage().quarantine, store.has(key(1))) == (0, SIZE, False)


def test_what_others_take_does_not_make_the_live_chunks_leave_one_by_one(tmp_path):
    """The watermark is of what the live chunks may take: near a full disk they still fill it."""
    for number in range(16):
        write(tmp_path, key(number, model=DEAD), age=100)
    store = opened(tmp_path, budget=20 * SIZE)
    for number in range(30):
        assert stored(store, tmp_path, key(number))
        assert store.index.count == min(number + 1, 3)
    assert not stored(store, tmp_path, key(99), size=5 * SIZE)
    assert store.index.count == 3  # nothing left for what could not come


def test_a_quota_bounds_one_model_name(tmp_path):
    store = Store(str(tmp_path), ["*"], 100 * SIZE, quotas={LIVE: 4 * SIZE}, free_bytes=lambda: 10**12)
    store.scan()
    for number in range(10):
        assert stored(store, tmp_path, key(number))
        assert stored(store, tmp_path, key(number, model=DEAD))
        assert store.index.bytes_of(LIVE) <= 4 * SIZE
    assert store.index.bytes_of(DEAD) == 10 * SIZE
    assert not stored(store, tmp_path, key(99), size=5 * SIZE)


def test_a_decorated_name_belongs_to_its_model(tmp_path):
    write(tmp_path, key(1, model=f"{LIVE}##dcp-2"))
    assert opened(tmp_path).has(key(1, model=f"{LIVE}##dcp-2"))


def test_the_index_is_saved_and_taken_only_for_the_same_root(tmp_path):
    (tmp_path / ".kvpersist/quarantine").mkdir(parents=True)
    for number in range(5):
        for rank in range(3):
            write(tmp_path, key(number, rank, salt="s" * number), age=number)
    write(tmp_path, key(7, model=DEAD))
    store = opened(tmp_path)
    store.save()
    again = Store(str(tmp_path), [LIVE], 10**9)
    assert again.open()
    assert list(again.index.oldest_sets()) == list(store.index.oldest_sets())
    size = (tmp_path / ".kvpersist/index").stat().st_blocks * 512
    assert (again.usage().live, again.usage().foreign) == (store.usage().live, store.usage().foreign + size)
    assert stored(again, tmp_path, key(8, salt="new"))
    assert not Store(str(tmp_path), [LIVE], 10**9).open()
    again.save()
    assert Store(str(tmp_path), [LIVE], 10**9).open()
    assert not Store(str(tmp_path), [DEAD], 10**9).open()
    (tmp_path / ".kvpersist/changed").touch()
    assert not Store(str(tmp_path), [LIVE], 10**9).open()


def test_an_index_that_is_known_to_be_outdated_is_not_saved(tmp_path):
    """After a cleanup beside the server, and after another model became the live one."""
    (tmp_path / ".kvpersist/quarantine").mkdir(parents=True)
    write(tmp_path, key(1))
    write(tmp_path, key(2, model=DEAD))
    store = opened(tmp_path)
    store.save()
    (tmp_path / file_name(key(2, model=DEAD))).unlink()
    (tmp_path / ".kvpersist/changed").touch()
    store.save()
    again = Store(str(tmp_path), [LIVE], 10**9)
    assert not again.open()
    assert again.usage().dead == 0
    again.live = frozenset([DEAD])
    again.save()
    assert not Store(str(tmp_path), [DEAD], 10**9).open()


@pytest.mark.parametrize("change", ["comes", "goes", "comes from another model"])
def test_what_others_do_beside_the_server_is_counted_at_the_next_start(tmp_path, change):
    """The server does not see it, so its index is not the root's."""
    (tmp_path / ".kvpersist/quarantine").mkdir(parents=True)
    for number in range(3):
        write(tmp_path, key(number))
    store = opened(tmp_path)
    assert stored(store, tmp_path, key(3))
    if change == "goes":
        (tmp_path / file_name(key(0))).unlink()
    else:
        write(tmp_path, key(9, model=DEAD if "another" in change else LIVE))
    store.save()
    again = Store(str(tmp_path), [LIVE], 10**9)
    assert not again.open()
    assert again.usage().live == len([name for name in names(tmp_path) if LIVE in name]) * SIZE
    again.save()
    assert Store(str(tmp_path), [LIVE], 10**9).open()


@pytest.mark.parametrize("what", ["model_bytes", "names", "count"])
def test_the_head_of_the_index_is_checked_too(tmp_path, what):
    (tmp_path / ".kvpersist/quarantine").mkdir(parents=True)
    write(tmp_path, key(1))
    opened(tmp_path).save()
    saved = tmp_path / ".kvpersist/index"
    line, _, body = saved.read_bytes().partition(b"\n")
    head = json.loads(line)
    head[what] = ["x"] if what == "names" else [1] if what == "model_bytes" else 9
    saved.write_bytes(json.dumps(head).encode() + b"\n" + body)
    assert not Store(str(tmp_path), [LIVE], 10**9).open()


@pytest.mark.parametrize("damage", [lambda d: b"", lambda d: d[:-1], lambda d: d[:-1] + b"!", lambda d: b"{}\n" + d])
def test_a_damaged_index_is_not_taken(tmp_path, damage):
    (tmp_path / ".kvpersist/quarantine").mkdir(parents=True)
    write(tmp_path, key(1))
    opened(tmp_path).save()
    saved = tmp_path / ".kvpersist/index"
    saved.write_bytes(damage(saved.read_bytes()))
    store = Store(str(tmp_path), [LIVE], 10**9)
    assert not store.open()
    assert store.has(key(1))


def test_the_store_is_used_while_the_root_is_read(tmp_path, monkeypatch):
    """What came or left meanwhile is in the new index as it is on the disk."""
    for number in range(3):
        write(tmp_path, key(number), age=100)
    store = opened(tmp_path)
    read = store._read

    def slow():
        found = read()
        assert stored(store, tmp_path, key(9))
        (tmp_path / file_name(key(0))).unlink()
        store.forget(key(0))
        return found

    monkeypatch.setattr(store, "_read", slow)
    store.scan()
    assert [store.has(key(number)) for number in (0, 1, 2, 9)] == [False, True, True, True]
    assert store.usage().live == 3 * SIZE


def test_another_name_becomes_the_live_one_while_the_root_is_read(tmp_path, monkeypatch):
    """The running scan is of the wrong name: it is done again, and nothing of the first name is evicted meanwhile."""
    write(tmp_path, key(1))
    write(tmp_path, key(2, model=DEAD))
    store = opened(tmp_path, budget=3 * SIZE)
    read = store._read

    def switched():
        found = read()
        if store.live == frozenset([LIVE]):
            store.serve(DEAD)
            assert (store.usage().dead, store.has(key(1))) == (2 * SIZE, False)
            assert not store.promise(2 * SIZE, DEAD)
        return found

    monkeypatch.setattr(store, "_read", switched)
    store.scan()
    assert [store.has(key(1)), store.has(key(2, model=DEAD))] == [False, True]
    assert (store.usage().live, store.usage().dead) == (SIZE, SIZE)
    assert len(names(tmp_path)) == 2


def test_a_model_name_with_slashes_is_found_again(tmp_path):
    """A file name cannot have them, so a scan gives them back as dashes."""
    chunk = key(1, model="org/name")
    store = Store(str(tmp_path), ["org/name"], 4 * SIZE, quotas={"org/name": 3 * SIZE}, free_bytes=lambda: 10**12)
    store.scan()
    assert stored(store, tmp_path, chunk)
    store.scan()
    assert store.has(chunk)
    assert store.pin(chunk)
    assert not stored(store, tmp_path, key(2, model="org/name"), size=3 * SIZE)  # it is in use
    assert stored(store, tmp_path, chunk)
    assert store.usage().live == SIZE
    store.unpin(chunk)
    assert stored(store, tmp_path, key(2, model="org/name"), size=3 * SIZE)


def test_a_use_is_written_to_the_file(tmp_path):
    write(tmp_path, key(1), age=900)
    write(tmp_path, key(2), age=100)
    store = opened(tmp_path)
    store.stamp([key(1)])
    assert [members[0][0] for members in opened(tmp_path).index.oldest_sets()] == [key(2), key(1)]


def test_a_file_that_cannot_be_read_goes_on_counting(tmp_path):
    write(tmp_path, key(1))
    store = opened(tmp_path)
    store.set_aside(key(1))
    assert (store.usage().live, store.usage().foreign) == (0, SIZE)
    assert stored(store, tmp_path, key(1))
    assert (store.usage().live, store.usage().foreign) == (SIZE, 0)


def test_a_name_that_is_no_utf_8_is_no_obstacle(tmp_path):
    write(tmp_path, key(1, salt="\udcff"))
    (tmp_path / "\udcff\n").write_bytes(b"x" * 4096)
    store = opened(tmp_path)
    assert (store.index.count, store.usage().foreign) == (1, 4096)
    assert next(store.index.oldest_sets())[0][0].salt == "\udcff"


def test_all_namespaces_can_be_live(tmp_path):
    write(tmp_path, key(1))
    write(tmp_path, key(1, model=DEAD))
    write(tmp_path, key(1, salt="s"))
    store = Store(str(tmp_path), ["*"], 10**9)
    store.scan()
    assert (store.index.count, store.usage().dead) == (3, 0)


@pytest.mark.parametrize("ranks", [1, 4])
def test_memory_of_the_index(ranks):
    """A million files in at most 250 MB; here a tenth of it."""
    index, count = Index(), 100_000
    tracemalloc.start()
    for number in range(count // ranks):
        for rank in range(ranks):
            index.add(key(number, rank), SIZE)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.count == count
    assert used / count < 250


def test_a_full_root_is_read_again_now_and_then(tmp_path, monkeypatch):
    """Where dead files fill the budget for good, reading the root takes a hundredth of the time at most."""
    for number in range(10):
        write(tmp_path, key(number, model=DEAD))
    store = opened(tmp_path, budget=10 * SIZE)
    assert not stored(store, tmp_path, key(99))
    now, seconds = time.monotonic(), iter([0.0])
    monkeypatch.setattr(time, "monotonic", lambda: now + next(seconds, 20.0))
    monkeypatch.setattr(store, "_refused", True)
    store.scan()  # took 20 s
    for later, stale in ((61, False), (1999, False), (2001, True)):
        monkeypatch.setattr(store, "_refused", True)
        monkeypatch.setattr(time, "monotonic", lambda later=later: now + 20 + later)
        assert store.stale() is stale
