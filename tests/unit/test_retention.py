"""What is reported, what is damaged, and what may be removed: never a link, another file system, or a name that is
no chunk's."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
import tracemalloc
import zlib

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import retention
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.objects import ChunkKey, Frame, file_name
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.store import CHANGED_FILE, Store
from conftest import COLLECTION

LIVE, DEAD = "live-kvp-1", "dead-kvp-2"
NOW = 1_000_000.0
DAY = 86400


def rank(number, world=4):
    return world << 24 | number << 16 | world << 8 | number


def write(root, name, days=0.0, size=8192):
    path = root / (name if isinstance(name, str) else file_name(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (NOW - days * DAY,) * 2)
    return path


def key(number, world_rank=0, model=LIVE):
    return ChunkKey(model, number.to_bytes(32, "big"), rank(world_rank))


@pytest.fixture
def root(tmp_path):
    for number in range(4):
        write(tmp_path, key(1, number), days=1)
    write(tmp_path, key(2, 0), days=3)
    for number in range(4):
        write(tmp_path, key(1, number, DEAD), days=10)
    write(tmp_path, f"{file_name(key(9))}.tmp.1f", days=1, size=4096)
    write(tmp_path, f"{file_name(key(8))}.tmp.2f", days=0, size=4096)
    write(tmp_path, f".kvpersist/quarantine/{file_name(key(7))}.1", days=2, size=4096)
    write(tmp_path, "notes.txt", days=99, size=4096)
    write(tmp_path, "sub/inner.bin", days=99, size=4096)
    (tmp_path / f"{file_name(key(5))}").symlink_to(write(tmp_path, "notes2.txt", days=99))
    (tmp_path / file_name(key(6))).mkdir()
    (tmp_path / "kvp-1.json").write_text(json.dumps({"model": LIVE, "identity": {"chunk_size": 256}}))
    return tmp_path


def names(chosen):
    return sorted(file.name for file in chosen)


def test_report(root):
    shown = retention.report(str(root), [LIVE], NOW)
    assert shown["namespaces"][LIVE] == {
        "live": True,
        "bytes": 5 * 8192,
        "objects": 5,
        "complete_sets": 1,
        "incomplete_sets": 1,
        "tokens": 256,
        "oldest_seconds": 3 * DAY,
        "newest_seconds": DAY,
        "served_tokens": None,
        "saved_bytes": None,
    }
    assert shown["namespaces"][DEAD]["live"] is False
    assert shown["namespaces"][DEAD]["tokens"] is None
    assert shown["bytes"]["live"] == 5 * 8192
    assert shown["bytes"]["dead"] == 4 * 8192
    assert (shown["bytes"]["temp"], shown["bytes"]["quarantine"]) == (8192, 4096)
    assert shown["disk_bytes"] > 0
    assert (shown["budget_bytes"], shown["warnings"]) == (None, [])


def test_report_and_store_count_alike(root):
    write(root, ChunkKey(LIVE, b"salted" * 4, rank(0), salt="t_1"), days=1)
    write(root, ChunkKey(f"{LIVE}##dcp", b"other" * 4, rank(0)), days=1)
    write(root, ".kvpersist/index", size=12288)
    store = Store(str(root), [LIVE], 10**12)
    store.scan()
    assert retention.report(str(root), [LIVE])["bytes"] == vars(store.usage())


def test_a_decorated_name_is_its_models(root):
    """LMCache appends ##... to the name for some layouts."""
    decorated = file_name(key(1, 0, f"{LIVE}##dcp"))
    write(root, decorated, days=1)
    row = retention.report(str(root), [LIVE], NOW)["namespaces"][f"{LIVE}##dcp"]
    assert (row["live"], row["incomplete_sets"], row["tokens"]) == (True, 1, 0)
    assert decorated not in select(root, dead=True)
    assert decorated in select(root, namespace=LIVE)
    order = retention.removable(str(root), [LIVE], now=NOW, to_budget=0)
    assert all(file.namespace == DEAD for file in order[:4])
    assert decorated in names(order[4:])
    assert retention.namespaces(str(root)) == {LIVE, DEAD}


def test_names_that_differ_in_more_than_the_hash_are_told_apart(root, monkeypatch):
    """The report takes a name apart only once for each head: what follows has to be a hash all the same."""
    plain = file_name(key(1, 0))
    head = plain.rpartition("_")[0]
    hashes = ("AB" * 32, "ab" * 32 + " ", "ab cd" * 8, "ab" * 3, "ab" * 65, "", "zz" * 32, "ab" * 31 + "a")
    odd = [f"{head}_{each}.bin" for each in hashes] + [f"{head}_{'ab' * 32}.bim", f"{head}_{'ab' * 32}"]
    for name in odd:
        write(root, name)
    shorter = write(root, f"{head}_{'ab' * 16}.bin").name
    salted = write(root, f"{head}_{'ab' * 16}@s.bin").name
    order = [plain, *odd, shorter, salted]
    entries = sorted(retention.walk(str(root)), key=lambda entry: order.index(entry[0]) if entry[0] in order else 99)
    monkeypatch.setattr(retention, "walk", lambda root: entries)
    shown = retention.report(str(root), [LIVE], NOW)
    assert shown["namespaces"][LIVE]["objects"] == 5 + 2
    assert shown["namespaces"][LIVE]["incomplete_sets"] == 1 + 2
    found = {file.name: file.kind for file in retention.files(str(root))}
    assert {found[name] for name in odd} == {"foreign"}
    assert found[shorter] == found[salted] == "chunk"


def test_a_set_is_complete_with_all_ranks_of_each_group(tmp_path):
    for number, members in enumerate([[(0, 0), (1, 0), (0, 1), (1, 1)], [(0, 0), (1, 0), (0, 1)], [(0, 99999)]]):
        for of, group in members:
            write(tmp_path, ChunkKey(LIVE, number.to_bytes(32, "big"), rank(of, 2), group))
    row = retention.report(str(tmp_path), [LIVE])["namespaces"][LIVE]
    assert (row["complete_sets"], row["incomplete_sets"]) == (1, 2)


def test_what_shared_prefixes_saved(root):
    row = retention.report(str(root), [LIVE], NOW, served={LIVE: 2560, "other": 1})["namespaces"][LIVE]
    assert row["served_tokens"] == 2560
    assert row["saved_bytes"] == 10 * 4 * 8192  # ten times the one complete set
    shown = retention.report(str(root), [LIVE], NOW, served={})["namespaces"]
    assert (shown[LIVE]["served_tokens"], shown[LIVE]["saved_bytes"]) == (0, 0)
    assert shown[DEAD]["served_tokens"] is None
    (root / "kvp-1.json").unlink()
    row = retention.report(str(root), [LIVE], NOW, served={LIVE: 2560})["namespaces"][LIVE]
    assert (row["served_tokens"], row["saved_bytes"]) == (2560, None)


@pytest.mark.parametrize(
    "text", ["", "[" * 10**5, "[]", "{}", '{"model": "live-kvp-1", "identity": []}', '{"model": "m", "identity": {}}']
)
def test_a_manifest_that_is_none(root, text):
    (root / "kvp-1.json").write_text(text)
    assert retention.report(str(root), [LIVE])["namespaces"][LIVE]["tokens"] is None


def test_a_manifest_is_neither_a_link_nor_a_pipe(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "m.json"
    (root / "kvp-1.json").rename(other)
    (root / "kvp-1.json").symlink_to(other)
    assert retention.report(str(root), [LIVE])["namespaces"][LIVE]["tokens"] is None
    (root / "kvp-1.json").unlink()
    os.mkfifo(root / "kvp-1.json")
    assert retention.report(str(root), [LIVE])["namespaces"][LIVE]["tokens"] is None


def warned(root, budget, reserve=0, live=(LIVE,)):
    return retention.report(str(root), live, NOW, budget=budget, reserve=reserve)["warnings"]


def test_warnings(root):
    sizes = retention.report(str(root), [LIVE], NOW)["bytes"]
    for text, silent in {
        "dead namespaces take": 2 * sizes["dead"],
        "files that are no chunks take": 2 * sizes["foreign"],
        "the root takes": sum(sizes.values()),
    }.items():
        assert not any(text in warning for warning in warned(root, silent))
        assert any(text in warning for warning in warned(root, silent - 1))
    assert warned(root, 10**12) == []
    (warning,) = warned(root, 10**12, reserve=10**18)
    assert warning.startswith("the disk has")
    assert all("kvp-admin" in warning for warning in warned(root, 1, reserve=10**18))
    assert "kvp-admin cleanup --dead" in warned(root, 1)[0]


def test_a_host_that_serves_uncached_is_not_told_to_remove_everything(root):
    assert not any("--dead" in text for text in warned(root, 1, live=()))


def test_prometheus(root):
    write(root, ChunkKey('a"b\\\n\udcff-kvp-3', b"salt" * 4, rank(0)))
    text = retention.prometheus(retention.report(str(root), [LIVE], NOW, budget=10**9, served={LIVE: 2560}))
    lines = text.splitlines()
    labels = f'{{namespace="kvp-1",model="{LIVE}",class="live"}}'
    assert f"kvp_report_namespace_bytes{labels} {5 * 8192}" in lines
    assert f"kvp_report_namespace_tokens{labels} 256" in lines
    assert f"kvp_report_namespace_saved_bytes{labels} {10 * 4 * 8192}" in lines
    assert f'kvp_report_namespace_objects{{namespace="kvp-2",model="{DEAD}",class="dead"}} 4' in lines
    assert "kvp_report_budget_bytes 1000000000" in lines
    assert 'kvp_report_bytes{class="temp"} 8192' in lines
    assert not any("tokens" in line and DEAD in line for line in lines)
    assert r'model="a\"b\\\n\\udcff-kvp-3"' in text
    text.encode()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert {line.split("{")[0].split()[0] for line in lines if not line.startswith("#")} == set(names)


def many(count, root, ranks=1):
    """As walk() gives them, without the files."""
    seen = os.lstat(root)
    mode = (stat.S_IFREG | 0o600, *seen[1:10])
    for number in range(count // ranks):
        chunk_hash = hashlib.sha256(number.to_bytes(8, "big")).hexdigest()
        for each in range(ranks):
            yield f"{LIVE}_{rank(each, ranks):08x}_0_{chunk_hash}.bin", os.stat_result((*mode, *seen[10:]), like(seen))


def like(seen):
    return {name: getattr(seen, name) for name in ("st_blocks", "st_mtime", "st_mtime_ns", "st_ctime", "st_atime")}


def test_memory_of_a_report(tmp_path, monkeypatch):
    """A million files in 250 MB: a tenth of them in a tenth of that."""
    monkeypatch.setattr(retention, "walk", lambda root: many(100_000, root))
    tracemalloc.start()
    try:
        shown = retention.report(str(tmp_path), [LIVE])
        assert tracemalloc.get_traced_memory()[1] < 25 * 10**6
    finally:
        tracemalloc.stop()
    assert shown["namespaces"][LIVE]["complete_sets"] == 100_000


def select(root, **what):
    return names(retention.removable(str(root), [LIVE], now=NOW, **what))


def test_selections(root):
    dead = sorted(file_name(key(1, number, DEAD)) for number in range(4))
    assert select(root) == []
    assert select(root, dead=True) == dead
    assert select(root, namespace=DEAD) == dead
    assert select(root, namespace=LIVE, older_than_seconds=2 * DAY) == [file_name(key(2, 0))]
    assert select(root, older_than_seconds=2 * DAY) == sorted([*dead, file_name(key(2, 0))])
    assert select(root, dead=True, older_than_seconds=11 * DAY) == []
    assert select(root, temp=True) == [f"{file_name(key(9))}.tmp.1f"]
    assert select(root, corrupt=True) == [f".kvpersist/quarantine/{file_name(key(7))}.1"]
    assert select(root, namespace="nobody") == []


def test_down_to_a_budget_the_dead_leave_first(root):
    total = sum(file.size for file in retention.files(str(root)))
    assert select(root, to_budget=total) == []
    assert select(root, to_budget=total - 4 * 8192) == select(root, dead=True)
    assert file_name(key(2, 0)) in select(root, to_budget=total - 4 * 8192 - 1)
    assert len(select(root, to_budget=0)) == 9
    assert not [name for name in select(root, to_budget=0) if "notes" in name or "json" in name]


def test_the_oldest_come_first(root):
    chosen = retention.removable(str(root), [LIVE], now=NOW, older_than_seconds=0)
    assert [file.used for file in chosen] == sorted(file.used for file in chosen)


def test_removing_takes_what_was_chosen_and_nothing_else(root):
    before = {str(path.relative_to(root)) for path in root.rglob("*")}
    chosen = retention.removable(str(root), [], now=NOW, dead=True, temp=True, corrupt=True)
    removed, kept = retention.remove(str(root), chosen)
    assert kept == []
    after = {str(path.relative_to(root)) for path in root.rglob("*")}
    assert before - after == {file.name for file in removed} == {file.name for file in chosen}
    assert (root / "notes2.txt").exists()
    assert (root / file_name(key(5))).is_symlink()
    assert (root / file_name(key(6))).is_dir()


def test_what_changed_under_the_name_is_kept(root):
    chosen = retention.removable(str(root), [LIVE], now=NOW, dead=True)
    victim = root / chosen[0].name
    victim.unlink()
    victim.symlink_to(root / "notes.txt")
    (root / chosen[1].name).unlink()
    (root / chosen[1].name).mkdir()
    (root / chosen[2].name).unlink()
    removed, kept = retention.remove(str(root), chosen)
    assert names(removed) == [chosen[3].name]
    assert names(file for file, _ in kept) == sorted([chosen[0].name, chosen[1].name])
    assert victim.is_symlink()
    assert (root / "notes.txt").exists()


def test_what_was_used_meanwhile_stays(root):
    chosen = retention.removable(str(root), [LIVE], now=NOW, older_than_seconds=0)
    os.utime(root / chosen[0].name)
    removed, kept = retention.remove(str(root), chosen)
    assert names(removed) == names(chosen[1:])
    assert kept == []


def tree(root):
    """Every path below the root."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


CHUNK_NAME = file_name(key(1))
ODD_NAMES = ["", ".", "..", "notes.txt", "kvp-1.json", ".kvpersist/changed", f"sub/{CHUNK_NAME}", f"/{CHUNK_NAME}"]
ODD_NAMES += [
    f"../{CHUNK_NAME}",
    f"../outside/{CHUNK_NAME}",
    f".kvpersist/quarantine/../{CHUNK_NAME}",
    f"./{CHUNK_NAME}",
]
ODD_NAMES += [f".kvpersist/quarantine/deep/{CHUNK_NAME}", ".kvpersist/quarantine/..", ".kvpersist/quarantine/"]
ODD_NAMES += [f".kvpersist/quarantine/{base}" for base in ("notes.1", CHUNK_NAME, f"{CHUNK_NAME}.x", f"{CHUNK_NAME}.")]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_that_is_no_chunks_is_never_removed(root, name):
    """Whatever stands in the list."""
    outside = root / "root"
    for path in [f"../{CHUNK_NAME}", f"../outside/{CHUNK_NAME}", f"sub/{CHUNK_NAME}", f".kvpersist/{CHUNK_NAME}"]:
        write(outside, path)
    write(outside, f".kvpersist/quarantine/deep/{CHUNK_NAME}")
    for path in ["notes.txt", "kvp-1.json", CHUNK_NAME]:
        write(outside, path)
    for base in ["notes.1", CHUNK_NAME, f"{CHUNK_NAME}.x", f"{CHUNK_NAME}."]:
        write(outside, f".kvpersist/quarantine/{base}")
    assert retention.removable(str(outside), [], corrupt=True) == []
    before = tree(root)
    listed = retention.File(name, 0, NOW, retention.CHUNK, LIVE)
    removed, kept = retention.remove(str(outside), [listed])
    assert removed == []
    assert tree(root) == before
    assert [file.name for file, _ in kept] in ([name], [])
    if "quarantine/" not in name:
        assert kept[0][1] == "its name is not one that may be removed"


def test_names_that_a_server_never_wrote(tmp_path):
    """They are listed and removed for what they are, and no byte of a name is lost."""
    odd = {
        f"two\nlines-kvp-1_{rank(0):08x}_0_{'ab' * 32}.bin": "chunk",
        f"-rf-kvp-1_{rank(0):08x}_0_{'ab' * 32}.bin": "chunk",
        f"\udcff-kvp-1_{rank(0):08x}_0_{'ab' * 32}.bin": "chunk",
        f"m-kvp-1_{rank(0):08x}_0_{'ab' * 32}@\udcff.bin": "chunk",
        f"m-kvp-1_{rank(0):08x}_0_{'ab' * 32}.bin\n": "foreign",
        f"m-kvp-1_{rank(0):08x}_0_{'ab' * 32}.bin.": "foreign",
        f"m-kvp-1_{rank(0):08x}_0_{'ab' * 32}.bin\n.bin.tmp.1f": "foreign",
        "_00000000_0_abababab.bin": "foreign",
    }
    for name in odd:
        write(tmp_path, name, days=1)
    assert {file.name: file.kind for file in retention.files(str(tmp_path))} == odd
    assert sum(row["objects"] for row in retention.report(str(tmp_path), [])["namespaces"].values()) == 4
    chosen = retention.removable(str(tmp_path), [], dead=True, temp=True, corrupt=True)
    removed, kept = retention.remove(str(tmp_path), chosen)
    assert (names(removed), kept) == (sorted(name for name, kind in odd.items() if kind == "chunk"), [])
    assert {path.name for path in tmp_path.iterdir()} == {name for name, kind in odd.items() if kind == "foreign"}


@pytest.mark.parametrize("link", [".kvpersist", ".kvpersist/quarantine"])
def test_a_quarantine_that_is_a_link_is_not_followed(root, tmp_path_factory, link):
    other = tmp_path_factory.mktemp("other")
    chosen = retention.removable(str(root), [LIVE], now=NOW, corrupt=True)
    assert len(chosen) == 1
    (root / link).rename(other / "moved")
    (root / link).symlink_to(other / "moved")
    before = tree(other)
    assert retention.removable(str(root), [LIVE], now=NOW, corrupt=True) == []
    removed, ((_, why),) = retention.remove(str(root), chosen)
    assert removed == []
    assert why
    assert tree(other) == before
    # Nor is the stamp written through it.
    assert len(retention.remove(str(root), retention.removable(str(root), [LIVE], now=NOW, dead=True))[0]) == 4
    assert "changed" not in "".join(tree(other)) or link == ".kvpersist/quarantine"


MOUNTED = """
import os, subprocess, sys
sys.path.insert(0, sys.argv[1])
from kvpersist import retention
root, chunk = sys.argv[2], sys.argv[3]
for place in (".kvpersist/quarantine", "sub"):
    subprocess.run(["mount", "-t", "tmpfs", "none", os.path.join(root, place)], check=True)
    with open(os.path.join(root, place, os.path.basename(sys.argv[4])), "w") as file:
        file.write("x" * 8192)
over = os.path.join(root, "sub", os.path.basename(sys.argv[4]))
subprocess.run(["mount", "--bind", over, os.path.join(root, chunk)], check=True)
shown = retention.report(root, [])
assert chunk not in [file.name for file in retention.files(root)]
assert shown["bytes"]["quarantine"] == shown["bytes"]["dead"] == 0, shown
chosen = retention.removable(root, [], dead=True, corrupt=True)
assert chosen == [], chosen
listed = [retention.File(n, 0, os.stat(os.path.join(root, n)).st_mtime, "chunk", "") for n in (chunk, sys.argv[4])]
removed, kept = retention.remove(root, listed)
assert removed == [] and len(kept) == 2, (removed, kept)
assert os.path.exists(os.path.join(root, sys.argv[4])) and os.path.exists(os.path.join(root, chunk))
print("kept")
"""


def test_another_file_system_is_not_entered(tmp_path):
    write(tmp_path, CHUNK_NAME, days=1)
    aside = f".kvpersist/quarantine/{CHUNK_NAME}.1"
    write(tmp_path, aside)
    write(tmp_path, "sub/x")
    space = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*space, "mount", "-t", "tmpfs", "none", tmp_path / "sub"], check=False).returncode != 0:
        pytest.skip("no mount namespaces here")
    core = str(COLLECTION / "plugins/module_utils")
    words = [sys.executable, "-c", MOUNTED, core, tmp_path, CHUNK_NAME, aside]
    done = subprocess.run([*space, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr


def test_a_hundred_thousand_files(tmp_path):
    top = os.open(tmp_path, os.O_RDONLY)
    for number in range(100_000):
        os.mknod(file_name(key(number, model=DEAD if number % 2 else LIVE)), 0o600, dir_fd=top)
    os.close(top)
    chosen = retention.removable(str(tmp_path), [LIVE], dead=True)
    removed, kept = retention.remove(str(tmp_path), chosen)
    assert (len(removed), kept) == (50_000, [])
    assert list(retention.report(str(tmp_path), [LIVE])["namespaces"]) == [LIVE]


# -- what a running server is told -----------------------------------------------------------


def changed(root):
    store = Store(str(root), [LIVE], 10**12)
    store.scan()
    store._scanned_at -= 10
    assert not store.stale()
    yield
    yield store.stale()


def test_a_running_server_is_told(root):
    told = changed(root)
    next(told)
    retention.remove(str(root), retention.removable(str(root), [LIVE], now=NOW, dead=True))
    assert next(told)
    stamp = root / CHANGED_FILE
    assert stat.S_IMODE(stamp.stat().st_mode) == 0o600
    assert stamp.stat().st_uid == root.stat().st_uid
    os.utime(stamp, (NOW, NOW))
    told = changed(root)
    next(told)
    retention.remove(str(root), retention.removable(str(root), [LIVE], now=NOW, temp=True))
    assert next(told)


def test_nothing_removed_is_nothing_told(root):
    told = changed(root)
    next(told)
    (notes,) = [file for file in retention.files(str(root)) if file.name == "notes.txt"]
    retention.remove(str(root), [notes])
    retention.remove(str(root), [])
    assert not next(told)
    assert not (root / CHANGED_FILE).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_stamp_belongs_to_the_owner_of_the_root(root):
    os.chown(root, 5550, 5551)
    retention.remove(str(root), retention.removable(str(root), [LIVE], now=NOW, dead=True))
    assert ((root / CHANGED_FILE).stat().st_uid, (root / CHANGED_FILE).stat().st_gid) == (5550, 5551)


def test_a_stamp_is_not_written_through_a_link(root):
    notes = root / "notes.txt"
    (root / CHANGED_FILE).symlink_to(notes)
    before = notes.stat()
    retention.remove(str(root), retention.removable(str(root), [LIVE], now=NOW, dead=True))
    assert (notes.stat().st_mtime_ns, notes.stat().st_uid) == (before.st_mtime_ns, before.st_uid)


def test_a_full_disk_keeps_nobody_from_cleaning_up(root, monkeypatch):
    really = os.open

    def full(path, flags, *rest, **more):
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    removed, kept = retention.remove(str(root), retention.removable(str(root), [LIVE], now=NOW, dead=True))
    assert (len(removed), kept) == (4, [])


# -- verify ----------------------------------------------------------------------------------


def crc(data, start=0):
    return zlib.crc32(data, start)


def framed(root, number, model=LIVE, length=5000, salt="", name=None):
    """A chunk as the store writes it."""
    chunk = ChunkKey(model, number.to_bytes(32, "big"), rank(0), 0, salt)
    stored = (number.to_bytes(1, "big") + b"stored bytes") * length
    frame = Frame(chunk, "[[1]] bfloat16", "none", length, length)
    body = stored[:length] + bytes(frame.file_bytes - 4096 - length)
    path = root / (name or file_name(chunk))
    path.write_bytes(bytes(frame.sealed(memoryview(stored)[:length], crc)) + body)
    return path


def verdicts(root, **more):
    return {file.name: (file.verdict, file.why) for file in retention.verify(str(root), crc, **more)}


def verdict(path):
    return verdicts(path.parent)[path.name]


def edited(path, at, data):
    whole = bytearray(path.read_bytes())
    whole[at : at + len(data)] = data
    path.write_bytes(whole)


def test_intact_frames(tmp_path):
    paths = [framed(tmp_path, 1), framed(tmp_path, 2, length=4096, salt="tenant_1"), framed(tmp_path, 3, length=0)]
    paths.append(framed(tmp_path, 4, model=f"{LIVE}##dcp", length=1))
    assert verdicts(tmp_path) == {path.name: ("ok", "") for path in paths}


@pytest.mark.parametrize(
    "at", [0, 7, 11, 12, 15, 16, 24, 31, 32, 36, 40, 42, 44, 46, 48, 60, 90, 200, 4095, 4096, 9095]
)
def test_a_flipped_bit(tmp_path, at):
    path = framed(tmp_path, 1)
    edited(path, at, bytes([path.read_bytes()[at] ^ 4]))
    assert verdict(path)[0] == "damaged"


@pytest.mark.parametrize("length", [0, 1, 100, 4095, 4096, 8192, 12287])
def test_a_short_file(tmp_path, length):
    path = framed(tmp_path, 1)
    os.truncate(path, length)
    assert verdict(path)[0] == "damaged"
    assert f"the file has {length} bytes" in verdict(path)[1]


def test_a_long_file_and_a_zeroed_one(tmp_path):
    path = framed(tmp_path, 1)
    os.truncate(path, 16384)
    assert verdict(path)[0] == "damaged"
    path.write_bytes(bytes(12288))
    assert verdict(path) == ("damaged", "no frame: the file does not start with one")


def test_a_hole_where_the_bytes_were(tmp_path):
    path = framed(tmp_path, 1)
    edited(path, 4096, bytes(8192))
    assert verdict(path) == ("damaged", "the checksum does not match")


def test_swapped_files(tmp_path):
    one, two = framed(tmp_path, 1), framed(tmp_path, 2)
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    assert verdict(one) == ("damaged", f"the file holds {two.name}")
    assert verdict(two) == ("damaged", f"the file holds {one.name}")


@pytest.mark.parametrize(("at", "data"), [(8, b"\2\0"), (10, b"\x09")])
def test_another_release_is_no_damage(tmp_path, at, data):
    path = framed(tmp_path, 1)
    edited(path, at, data)
    assert verdict(path)[0] == "other_release"


def test_only_regular_files_of_the_root_are_read(tmp_path):
    path = framed(tmp_path, 1)
    name = file_name(key(2))
    (tmp_path / name).symlink_to(path)
    (tmp_path / file_name(key(3))).mkdir()
    os.mkfifo(tmp_path / file_name(key(4)))
    (tmp_path / f"{name}.tmp.1f").write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"x")
    assert verdicts(tmp_path) == {path.name: ("ok", "")}


def failing(monkeypatch, function, number):
    """Make that function of os fail for chunks."""
    really = getattr(os, function)

    def fails(first, *rest, **more):
        if not isinstance(first, str) or first.endswith(".bin"):
            raise OSError(number, os.strerror(number))
        return really(first, *rest, **more)

    monkeypatch.setattr(os, function, fails)


@pytest.mark.parametrize(("function", "number"), [("open", errno.EACCES), ("open", errno.EIO), ("preadv", errno.EIO)])
def test_a_file_that_cannot_be_read(tmp_path, monkeypatch, function, number):
    path = framed(tmp_path, 1)
    failing(monkeypatch, function, number)
    assert verdict(path) == ("unreadable", os.strerror(number))


def test_a_disk_that_fails_in_the_middle(tmp_path, monkeypatch):
    path = framed(tmp_path, 1, length=20000)
    monkeypatch.setattr(retention, "READ_BYTES", 4096)
    really = os.preadv

    def fails(file, buffers, offset):
        if offset >= 8192:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", fails)
    assert verdict(path)[0] == "unreadable"


@pytest.mark.parametrize("became", ["nothing", "link", "pipe", "directory"])
def test_a_file_that_is_gone_when_it_is_opened(tmp_path, tmp_path_factory, monkeypatch, became):
    path, other = framed(tmp_path, 1), framed(tmp_path_factory.mktemp("other"), 2)
    really = retention.walk

    def walk(root):
        for entry in list(really(root)):
            path.unlink()
            if became == "link":
                path.symlink_to(other)
            elif became == "pipe":
                os.mkfifo(path)
            elif became == "directory":
                path.mkdir()
            yield entry

    monkeypatch.setattr(retention, "walk", walk)
    assert verdict(path)[0] == "gone"


def test_a_file_that_is_evicted_while_it_is_read(tmp_path, monkeypatch):
    path = framed(tmp_path, 1)
    really = os.preadv

    def evicted(*words):
        path.unlink(missing_ok=True)
        return really(*words)

    monkeypatch.setattr(os, "preadv", evicted)
    assert verdict(path) == ("ok", "")


def test_files_of_the_stock_adapter_have_no_frame(tmp_path):
    write(tmp_path, key(1))
    assert verdict(tmp_path / file_name(key(1)))[0] == "damaged"
    manifest = {"model": LIVE, "identity": {"store_format": "raw"}}
    (tmp_path / "kvp-1.json").write_text(json.dumps(manifest))
    assert verdict(tmp_path / file_name(key(1)))[0] == "raw"
    other = framed(tmp_path, 1, model=DEAD)
    assert verdict(other)[0] == "ok"


def test_only_what_is_asked_for(tmp_path):
    paths = [framed(tmp_path, 1), framed(tmp_path, 1, model=f"{LIVE}##dcp"), framed(tmp_path, 1, model=DEAD)]
    assert set(verdicts(tmp_path, wanted={LIVE})) == {path.name for path in paths[:2]}


def test_a_file_is_read_in_pieces_that_leave_the_page_cache(tmp_path, monkeypatch):
    path = framed(tmp_path, 1, length=100_000)
    monkeypatch.setattr(retention, "READ_BYTES", 8192)
    pieces = []

    def advised(_, at, length, advice):
        assert advice == os.POSIX_FADV_DONTNEED
        pieces.append((at, length))

    monkeypatch.setattr(os, "posix_fadvise", advised)
    assert verdict(path)[0] == "ok"
    assert max(length for _, length in pieces) == 8192
    assert [at for at, _ in pieces] == [0, *range(4096, 104_096, 8192)]
    assert sum(length for _, length in pieces) == 104_096
    edited(path, 104_000, b"y")
    assert verdict(path)[0] == "damaged"


def test_memory_of_verify(tmp_path):
    framed(tmp_path, 1, length=64 * 2**20)
    tracemalloc.start()
    try:
        assert [file.verdict for file in retention.verify(str(tmp_path), crc)] == ["ok"]
        assert tracemalloc.get_traced_memory()[1] < 6 * 2**20
    finally:
        tracemalloc.stop()


def test_the_rate_is_bounded(tmp_path, monkeypatch):
    for number in range(10):
        framed(tmp_path, number, length=8192)
    clock = [0.0]
    monkeypatch.setattr(retention.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(retention.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    assert len(verdicts(tmp_path, bytes_per_second=12288.0)) == 10
    assert 9 < clock[0] <= 10  # the last read is not waited for
