"""The store against LMCache's own classes: store_contract.py ROOT SMALL_ROOT

Runs inside the serving image, as another user than root. SMALL_ROOT is a file system of 24 MiB.
Prints one line for each promise and ends with the count. With --interface it prints the part of
LMCache that the store stands on, to compare two versions.
"""

import dataclasses
import gc
import inspect
import json
import os
import pathlib
import shutil
import signal
import sys
import threading
import time

import torch
from kvpersist.objects import HEADER_BYTES, file_name
from kvpersist_lmcache import StoreAdapter, StoreAdapterConfig
from kvpersist_lmcache import adapter as store_adapter
from kvpersist_lmcache.adapter import chunk_key
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform.devices.cpu import shm

ROOT, SMALL = (pathlib.Path(path) for path in (sys.argv[1:3] * 2)[:2])
SHAPE = (2, 30, 256, 192)  # 5.9 MB of bfloat16, a chunk of SmolLM2
GB = 10**9
#: Errors of a file that cannot be read, which a test host may spell differently.
UNREADABLE = ("failed_loads_EACCES", "failed_loads_ELOOP", "failed_loads_EISDIR", "failed_loads_EINVAL")


def chunk(seed=None, shape=SHAPE, dtype=torch.bfloat16):
    """A memory object as the server's L1 gives it: aligned, and longer than its bytes."""
    size = torch.tensor(shape).prod().item() * dtype.itemsize
    whole = -(-size // 4096) * 4096
    base = torch.zeros(whole + 4096, dtype=torch.uint8)
    start = -base.data_ptr() % 4096
    memory = base[start : start + whole]
    if seed is not None:
        values = torch.randn(size // 2, generator=torch.Generator().manual_seed(seed))
        memory[:size] = values.to(torch.bfloat16).view(torch.uint8)
    meta = MemoryObjMetadata(
        shape=torch.Size(shape),
        dtype=dtype,
        address=memory.data_ptr(),
        phy_size=whole,
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[torch.Size(shape)],
        dtypes=[dtype],
    )
    made = TensorMemoryObj(raw_data=memory, metadata=meta, parent_allocator=None)
    made.base = base
    return made


def key(number, rank=0, model="m-kvp-1", salt=""):
    return ObjectKey(number.to_bytes(32, "big"), model, rank, 0, salt)


def path(number, root=ROOT):
    return root / file_name(chunk_key(key(number)))


def opened(root=ROOT, **more):
    return StoreAdapter(StoreAdapterConfig.from_dict({"root": str(root), "budget_bytes": GB, "live": ["*"], **more}))


def finished(function, *arguments):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        result = function(*arguments)
        if result:
            return result
        time.sleep(0.002)
    raise AssertionError("a task was left pending")


def store(adapter, numbers, **more):
    """Of key's parameters, ``more`` are those that are not the usual ones."""
    keys = [key(number, **more) for number in numbers]
    task = adapter.submit_store_task(keys, [chunk(number) for number in numbers])
    return finished(adapter.pop_completed_store_tasks)[task]


def load(adapter, numbers, shape=SHAPE, dtype=torch.bfloat16, **more):
    """Numbers whose chunks came back; what came back has to be what was stored."""
    keys, objects = [key(number, **more) for number in numbers], [chunk(None, shape, dtype) for _ in numbers]
    task = adapter.submit_lookup_and_lock_task(keys, {})
    found = finished(adapter.query_lookup_and_lock_result, task)
    task = adapter.submit_load_task(keys, objects)
    loaded = finished(adapter.query_load_result, task)
    adapter.submit_unlock(keys)
    good = [n for n in range(len(keys)) if found.test(n) and loaded.test(n)]
    for n in good:
        size = objects[n].get_size()
        assert torch.equal(objects[n].raw_data[:size], chunk(numbers[n]).raw_data[:size]), (
            f"wrong bytes of {numbers[n]}"
        )
    return [numbers[n] for n in good]


def there_and_back(adapter):
    assert store(adapter, range(4)).is_successful()
    assert load(adapter, range(5)) == [0, 1, 2, 3]
    for number in range(4):
        assert path(number).stat().st_mode & 0o777 == 0o600
        assert path(number).read_bytes()[HEADER_BYTES:] == bytes(chunk(number).raw_data.numpy())


def flip(file):
    data = bytearray(file.read_bytes())
    data[100000] ^= 1
    file.write_bytes(data)


def into(function):
    def change(file):
        file.unlink()
        function(file)

    return change


DAMAGE = {
    "flipped": flip,
    "truncated": lambda file: os.truncate(file, 5000),
    "cut to a page": lambda file: os.truncate(file, 4096),
    "extended": lambda file: os.truncate(file, file.stat().st_size + 4096),
    "empty": lambda file: os.truncate(file, 0),
    "another chunk's": lambda file: shutil.copy(path(0), file),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "a directory": into(lambda file: file.mkdir()),
    "a dangling link": into(lambda file: file.symlink_to("/nowhere")),
    "a link to another": into(lambda file: file.symlink_to(path(0))),
    "missing": lambda file: file.unlink(),
    "unreadable": lambda file: file.chmod(0),
}


def damage(adapter):
    """Never wrong bytes, the others are served, the next store heals."""
    numbers = range(10, 10 + len(DAMAGE))
    assert store(adapter, numbers).is_successful()
    for number, (name, change) in zip(numbers, DAMAGE.items()):
        change(path(number))
        assert load(adapter, [0, number, 1]) == [0, 1], name
        if path(number).is_dir() and not path(number).is_symlink():
            path(number).rmdir()  # a chunk cannot take a directory's name
        assert store(adapter, [number]).is_successful(), name
        assert load(adapter, [number]) == [number], name
    counts = adapter.report_status()["counts"]
    assert counts["checksum_misses"] >= 6
    assert counts["healed"] >= 6
    assert any(counts.get(name) for name in UNREADABLE)


def another_layout(adapter):
    assert store(adapter, [30]).is_successful()
    assert load(adapter, [30], shape=(2, 30, 192, 256)) == []
    assert store(adapter, [30]).is_successful()
    assert load(adapter, [30], dtype=torch.float16) == []


def another_release(adapter):
    """Of another version: a miss, and the file is kept."""
    assert store(adapter, [31]).is_successful()
    data = bytearray(path(31).read_bytes())
    data[8] = 9
    path(31).write_bytes(data)
    assert load(adapter, [31]) == []
    store(adapter, [31])
    assert path(31).read_bytes() == bytes(data)


def reopened(adapter):
    adapter.close()
    again = opened()
    try:
        assert load(again, range(4)) == [0, 1, 2, 3]
        live = sum(file.stat().st_blocks * 512 for file in ROOT.glob("*.bin"))
        assert again.store.usage().live == live
    finally:
        again.close()


def bins(root):
    return {file.name for file in root.glob("*.bin")}


def saved_index(_):
    """A start after a clean stop reads no directory; a stale or damaged index only costs that."""
    root = ROOT / "saved"
    root.mkdir()
    adapter = opened(root)
    assert not adapter.index_saved
    store(adapter, range(4))
    store(adapter, [4], salt="tenant", rank=7)
    usage = adapter.store.usage()
    adapter.close()
    adapter = opened(root)
    assert adapter.index_saved
    assert (adapter.store.usage().live, adapter.store.index.count) == (usage.live, 5)
    assert load(adapter, range(4)) == [0, 1, 2, 3]
    assert load(adapter, [4], salt="tenant", rank=7) == [4]
    adapter.close()
    path(2, root).unlink()  # behind its back
    adapter = opened(root)
    assert not adapter.index_saved
    assert load(adapter, range(4)) == [0, 1, 3]
    adapter.close()
    index = root / ".kvpersist/index"
    for damaged in (b"", index.read_bytes()[:-1], b"{}\n", index.read_bytes()[:-1] + b"!"):
        index.write_bytes(damaged)
        adapter = opened(root)
        assert not adapter.index_saved
        assert load(adapter, range(4)) == [0, 1, 3]
        adapter.close()


def recency(_):
    """What was looked up last stays, also over a restart without a clean stop."""
    root = ROOT / "recency"
    root.mkdir()
    adapter = opened(root, budget_bytes=10 * 6 * 10**6)
    for number in range(8):
        store(adapter, [number])
        time.sleep(0.01)
    assert load(adapter, [0, 1]) == [0, 1]
    adapter.close()
    (root / ".kvpersist/index").unlink()
    adapter = opened(root, budget_bytes=10 * 6 * 10**6)
    store(adapter, range(20, 23))
    assert {path(number, root).name for number in (0, 1)} <= bins(root)
    assert not path(2, root).exists()
    adapter.close()


def quotas(_):
    root = ROOT / "quotas"
    root.mkdir()
    adapter = opened(root, quotas={"small-kvp-1": 5 * 6 * 10**6})
    for number in range(10):
        assert store(adapter, [number], model="small-kvp-1").is_successful()
        assert store(adapter, [number], model="other-kvp-1").is_successful()
    names = bins(root)
    assert sum("small" in name for name in names) <= 5
    assert sum("other" in name for name in names) == 10
    adapter.close()


def cleaned_up(_):
    """Room that kvp-admin made is used without a restart."""
    root = ROOT / "cleaned"
    root.mkdir()
    adapter = opened(root, live=["dead-kvp-1"])
    store(adapter, range(9), model="dead-kvp-1")
    adapter.close()
    adapter = opened(root, live=["m-kvp-1"], budget_bytes=9 * 6 * 10**6)
    assert not store(adapter, [1]).is_successful()
    assert len(bins(root)) == 9
    for file in root.glob("dead*"):
        file.unlink()
    (root / ".kvpersist/changed").touch()
    time.sleep(1.1)
    store(adapter, [2])  # notices
    time.sleep(0.5)
    assert store(adapter, [3]).is_successful()
    assert adapter.store.usage().dead == 0
    adapter.close()


def kill_9(_):
    """Twenty writers killed in the middle: what is under its name is whole, the rest is a temp file."""
    root = ROOT / "killed"
    root.mkdir()
    objects = [chunk(number) for number in range(12)]
    served = unfinished = 0
    for burst in range(20):
        salt = f"burst-{burst}"
        writer = os.fork()
        if writer == 0:
            adapter = opened(root, fsync="none", budget_bytes=40 * 6 * 10**6)
            adapter.submit_store_task([key(number, salt=salt) for number in range(12)], objects)
            time.sleep(30)
            os._exit(0)
        time.sleep(0.02 + 0.004 * burst)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        temps = list(root.glob("*.tmp.*"))
        unfinished += len(temps)
        adapter = opened(root, budget_bytes=40 * 6 * 10**6)
        there = [n for n in range(12) if (root / file_name(chunk_key(key(n, salt=salt)))).exists()]
        if there:
            assert load(adapter, there, salt=salt) == there
        served += len(there)
        assert adapter.store.usage().temp == sum(file.stat().st_blocks * 512 for file in temps)
        adapter.close()
        for file in temps:
            file.unlink()
    assert unfinished > 0
    assert served > 0


def environment(_):
    """What the unit gives it: the live model and the codec."""
    os.environ.update(KVP_MODEL="env-kvp-1", LMCACHE_L2_SERDE="lz4")
    try:
        config = StoreAdapterConfig.from_dict({"root": "/x", "budget_bytes": GB})
        assert (config.live, config.codec) == (["env-kvp-1"], "lz4")
        os.environ["LMCACHE_L2_SERDE"] = "turboquant"
        unit = os.fork()
        if unit == 0:
            os.environ["SYSTEMD_EXEC_PID"] = str(os.getpid())
            StoreAdapterConfig.from_dict({"root": "/x", "budget_bytes": GB})
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(unit, 0)[1]) == os.EX_CONFIG
    finally:
        del os.environ["KVP_MODEL"], os.environ["LMCACHE_L2_SERDE"]


def one_server(adapter):
    try:
        opened()
    except ValueError as error:
        assert "another lmcache server" in str(error)
    else:
        raise AssertionError("a second server opened the root")


def wrong_parameters(_):
    for bad in ({"codec": "fp8"}, {"codec": "asym"}, {"root": "x"}, {"eviction": {}}, {"threads": True}, {"live": []}):
        try:
            StoreAdapterConfig.from_dict({"root": "/x", "budget_bytes": GB, "live": ["*"], **bad})
        except ValueError as error:
            assert "allowed" in str(error), error
        else:
            raise AssertionError(bad)


def codecs(_):
    for codec, least in (("zstd", 1.3), ("lz4", 1.05)):
        root = ROOT / codec
        root.mkdir()
        adapter = opened(root, codec=codec)
        assert store(adapter, range(4)).is_successful()
        assert load(adapter, range(4)) == [0, 1, 2, 3]
        ratio = adapter.counts["raw_bytes"] / adapter.counts["stored_bytes"]
        disk = sum(file.stat().st_blocks * 512 for file in root.glob("*.bin"))
        assert ratio >= least and abs(adapter.counts["raw_bytes"] / disk - ratio) < 0.05, (codec, ratio, disk)
        flip(path(1, root))
        assert load(adapter, range(4)) == [0, 2, 3]
        adapter.close()
        other = opened(root)  # another codec reads them: each frame names its own
        assert load(other, [0, 2, 3]) == [0, 2, 3]
        other.close()


def budget(_):
    """Over five restarts the disk never holds more than the budget."""
    root = ROOT / "budget"
    root.mkdir()
    limit = 10 * 6 * 10**6
    for run in range(5):
        adapter = opened(root, budget_bytes=limit)
        before = set(root.glob("*.bin"))
        assert len(before) == adapter.store.index.count
        for number in range(run * 20, run * 20 + 20):
            store(adapter, [number])
            used = sum(file.stat().st_blocks * 512 for file in root.rglob("*") if file.is_file())
            assert used <= limit, used
        assert adapter.store.usage().live == sum(file.stat().st_blocks * 512 for file in root.glob("*.bin"))
        assert load(adapter, [run * 20 + 19]) == [run * 20 + 19]
        adapter.close()


def only_live(_):
    root = ROOT / "live"
    root.mkdir()
    adapter = opened(root, live=["m-kvp-1"])
    store(adapter, [1], model="other-kvp-2")
    assert adapter.counts["refused_namespace"] == 1
    store(adapter, [2], salt="s" * 128)
    assert load(adapter, [1]) == []
    adapter.close()


def gate(_):
    """Nothing is stored or served until the gate is open; what is stored a moment before that waits for it."""
    root, file = ROOT / "gate", ROOT / "gate.json"
    root.mkdir()
    adapter = opened(root, gate_file=str(file), live=["m-kvp-1"])
    patience, store_adapter.GATE_SECONDS = store_adapter.GATE_SECONDS, 0.3
    store(adapter, [1, 2])
    assert adapter.counts["refused_gate"] == 2
    file.write_text(json.dumps({"gate": "closed", "model": ""}))
    assert load(adapter, [1]) == []
    admitted = json.dumps({"gate": "open", "model": "m-kvp-1"})
    store_adapter.GATE_SECONDS = patience
    time.sleep(0.02)
    file.write_text(json.dumps({"gate": "closed", "model": "m-kvp-1"}))
    threading.Timer(1, lambda: file.write_text(admitted)).start()
    assert store(adapter, [1]).is_successful()
    assert load(adapter, [1]) == [1]
    time.sleep(0.02)
    file.write_text(json.dumps({"gate": "closed", "model": "m-kvp-1"}))
    threading.Timer(1, lambda: file.write_text(admitted)).start()
    assert load(adapter, [1]) == [1]
    store_adapter.GATE_SECONDS = 0.3
    for text in (json.dumps({"gate": "closed", "model": ""}), json.dumps({"gate": "open"}), "{", "[]"):
        time.sleep(0.02)
        file.write_text(text)
        assert load(adapter, [1]) == [], text
    # The last chunks of a vLLM that takes leave are stored, and none once another one was seen.
    publish = adapter._publish
    adapter._publish = lambda *words: time.sleep(0.1) or publish(*words)
    for verdict, first in (("closed", 100), ("refused", 200)):
        time.sleep(0.02)
        file.write_text(admitted)
        refused = adapter.counts["refused_gate"]
        keys, objects = [key(number) for number in range(first, first + 40)], [chunk(number) for number in range(40)]
        task = adapter.submit_store_task(keys, objects)
        time.sleep(0.15)
        file.write_text(json.dumps({"gate": verdict, "model": ""}))
        assert finished(adapter.pop_completed_store_tasks)[task].is_successful() == (verdict == "closed")
        assert (adapter.counts["refused_gate"] > refused) == (verdict == "refused")
    adapter._publish = publish
    # Another model is served now: its chunks are live, those of the first are not evicted any more.
    time.sleep(0.02)
    file.write_text(json.dumps({"gate": "open", "model": "n-kvp-1"}))
    assert store(adapter, [2], model="n-kvp-1").is_successful()
    assert load(adapter, [2], model="n-kvp-1") == [2]
    assert load(adapter, [1]) == []
    assert adapter.store.usage().dead == sum(file.stat().st_blocks * 512 for file in root.glob("m-kvp-1*.bin")) > 0
    time.sleep(0.02)
    file.write_text(admitted)
    load(adapter, [1])
    time.sleep(0.5)
    assert load(adapter, [1]) == [1]
    adapter.close()


def full_disk(_):
    """Refused while the disk is full; storing resumes by itself."""
    adapter = opened(SMALL)
    for number in range(3):
        store(adapter, [number])
    filler = SMALL / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    for number in range(50, 53):
        store(adapter, [number])
    load(adapter, [0, 1, 2, 50, 51, 52])  # nothing wrong, nothing pending
    counts = adapter.report_status()["counts"]
    assert adapter.store.evicted or counts.get("refused_budget") or counts.get("failed_stores_ENOSPC")
    filler.unlink()
    assert store(adapter, [60]).is_successful()
    assert load(adapter, [60]) == [60]
    assert not list(SMALL.glob("*.tmp.*"))
    adapter.close()


def memory(_):
    """What a vLLM on CPUs has registered is mapped while a view of it lives, and no longer."""

    def mapped():
        return pathlib.Path("/proc/self/maps").read_text().count("lmcache_kv_")

    owner = torch.arange(1024.0)
    wire = shm.migrate_to_shm_and_wrap(owner).to_wire()
    tensor = shm.CpuShmTensorWrapper.from_wire(wire).to_tensor()
    assert mapped() == 2
    view = tensor.reshape(32, 32)[1]
    del tensor
    gc.collect()
    assert mapped() == 2
    assert view.tolist() == [float(number) for number in range(32, 64)]
    del view
    gc.collect()
    assert mapped() == 1


def interface():
    for kind in (L2AdapterInterface, L2AdapterConfigBase, MemoryObj, Bitmap):
        for name, member in sorted(vars(kind).items()):
            if callable(member) and not name.startswith("__"):
                print(
                    f"{kind.__name__}.{name}{inspect.signature(member)}"
                    if inspect.isfunction(member)
                    else f"{kind.__name__}.{name}"
                )
    for kind in (ObjectKey, AdapterUsage, L2StoreResult):
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        print(kind.__name__, inspect.signature(kind), *(f"{field.name}: {field.type}" for field in fields))


def main():
    if "--interface" in sys.argv:
        interface()
        return
    adapter = opened()
    checks = (
        *(there_and_back, damage, another_layout, another_release, one_server, wrong_parameters, environment),
        *(codecs, budget, kill_9, quotas, only_live, gate, recency, saved_index, cleaned_up, full_disk, reopened),
        memory,
    )
    for check in checks:
        check(adapter)
        print(f"ok: {check.__name__}", flush=True)
    print(f"{len(checks)} promises kept")


if __name__ == "__main__":
    main()
