"""What is reported, and what may be removed: never a link, another file system, or a name that is no chunk's."""

import json
import os

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import retention
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.objects import ChunkKey, file_name

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
    }
    assert shown["namespaces"][DEAD]["live"] is False
    assert shown["namespaces"][DEAD]["tokens"] is None
    assert shown["bytes"]["live"] == 5 * 8192
    assert shown["bytes"]["dead"] == 4 * 8192
    assert (shown["bytes"]["temp"], shown["bytes"]["quarantine"]) == (8192, 4096)
    assert shown["disk_bytes"] > 0


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
    assert (root / "notes.txt").exists()


def test_a_name_that_is_no_chunks_is_never_removed(root):
    (notes,) = [file for file in retention.files(str(root)) if file.name == "notes.txt"]
    removed, ((_, why),) = retention.remove(str(root), [notes])
    assert removed == []
    assert "may be removed" in why
    assert (root / "notes.txt").exists()
