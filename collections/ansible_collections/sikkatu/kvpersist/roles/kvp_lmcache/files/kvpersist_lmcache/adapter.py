"""L2 adapter that keeps the promises: checked frames, a true budget, repair.

It calls the core (package ``kvpersist``) and adds no policy of its own: names and frames are
``kvpersist.objects``, what is there and what leaves is ``kvpersist.store``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Optional

from crc32c import crc32c
from kvpersist import objects as chunkfile
from kvpersist import render
from kvpersist.objects import ChunkKey, Frame, FrameError, UnknownFrame
from kvpersist.store import PRODUCT_DIR, QUARANTINE_DIR, Store
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface, L2TaskId
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.mp_observability.otel_init import register_gauge
from lmcache.v1.platform import create_event_notifier

from . import codecs, guard

logger = init_logger("kvpersist")

#: Share of the budget that damaged files may take before the oldest of them leave.
QUARANTINE_SHARE = 0.01
#: Seconds that stores and lookups wait for a closed gate. vLLM stores right after it registers, before the gate has
#: looked, and LMCache does not offer a refused chunk again while it is in memory: the chat would not survive a restart.
#: And a lookup that waits is cheaper than a recompute.
GATE_SECONDS = 5.0
#: Length of ".tmp." and what makes the name of an unfinished file its own.
TEMP_BYTES = 37


class WrongSetting(ValueError):
    """A setting that no restart repairs.

    The server's web framework turns every failed start into the same exit status, and systemd
    would try again for ever. So the main process of a unit (which SYSTEMD_EXEC_PID names) ends
    at once, with a status that the unit does not restart after.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        if os.environ.get("SYSTEMD_EXEC_PID") == str(os.getpid()):
            print(f"kvpersist: {text}", file=sys.stderr, flush=True)
            os._exit(os.EX_CONFIG)


class StoreAdapterConfig(L2AdapterConfigBase):
    """``adapter_params``. Sizes are bytes; watermark and ratio are shares of the budget.

    ``live`` are the model names that are stored, read and evicted, ``["*"]`` all; without it
    the one of KVP_MODEL in the environment. ``codec`` likewise comes from LMCACHE_L2_SERDE.
    """

    def __init__(
        self,
        root: str,
        budget_bytes: int,
        live: list[str],
        reserve_bytes: int = 0,
        quotas: Optional[dict[str, int]] = None,
        trigger_watermark: float = 0.9,
        eviction_ratio: float = 0.1,
        codec: str = "none",
        fsync: str = "file",
        gate_file: str = "",
        threads: int = 8,
    ) -> None:
        self.root = root
        self.budget_bytes = budget_bytes
        self.live = live
        self.reserve_bytes = reserve_bytes
        self.quotas = quotas or {}
        self.trigger_watermark = trigger_watermark
        self.eviction_ratio = eviction_ratio
        self.codec = codec
        self.fsync = fsync
        self.gate_file = gate_file
        self.threads = threads

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> StoreAdapterConfig:
        """Raises WrongSetting that names the parameter, its value and what is allowed."""
        d = {**d}
        if os.environ.get("KVP_MODEL"):
            d.setdefault("live", [os.environ["KVP_MODEL"]])
        d.setdefault("codec", os.environ.get("LMCACHE_L2_SERDE") or "none")
        known = set(cls.__init__.__code__.co_varnames[1 : cls.__init__.__code__.co_argcount])
        for name in d:
            if name not in known:
                raise WrongSetting(f"adapter_params has {name!r}; allowed: {', '.join(sorted(known))}")
        rules: dict[str, tuple[Callable[[Any], bool], str]] = {
            "root": (lambda v: isinstance(v, str) and v.startswith("/"), "an absolute path"),
            "budget_bytes": (lambda v: _whole(v) and v >= chunkfile.PAGE_BYTES, "bytes, at least a page"),
            "live": (
                lambda v: isinstance(v, list) and len(v) > 0 and all(isinstance(name, str) and name for name in v),
                'a list of model names, ["*"] for all',
            ),
            "reserve_bytes": (lambda v: _whole(v) and v >= 0, "bytes"),
            "quotas": (
                lambda v: isinstance(v, dict) and all(_whole(size) and size > 0 for size in v.values()),
                "bytes, above 0, for each model name",
            ),
            "trigger_watermark": (lambda v: _share(v), "above 0, at most 1"),
            "eviction_ratio": (lambda v: _share(v), "above 0, at most 1"),
            "codec": (
                lambda v: v in chunkfile.CODECS,
                f"{', '.join(chunkfile.CODECS)} (LMCACHE_L2_SERDE); no lossy one",
            ),
            "fsync": (lambda v: v in render.FSYNC, ", ".join(render.FSYNC)),
            "gate_file": (lambda v: isinstance(v, str) and (not v or v.startswith("/")), "an absolute path, or empty"),
            "threads": (lambda v: _whole(v) and 1 <= v <= 64, "1 to 64"),
        }
        for name in ("root", "budget_bytes", "live"):
            if name not in d:
                raise WrongSetting(f"adapter_params lacks {name!r}; it is {rules[name][1]}")
        for name, value in d.items():
            allowed, text = rules[name]
            if not allowed(value):
                raise WrongSetting(f"adapter_params: {name} is {value!r}; allowed: {text}")
        return cls(**d)

    @classmethod
    def help(cls) -> str:
        return "Store of sikkatu.kvpersist: root, budget_bytes, live, and see docs/en/store.md"


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _share(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1


def chunk_key(key: ObjectKey) -> ChunkKey:
    return ChunkKey(key.model_name, key.chunk_hash, key.kv_rank, key.object_group_id, key.cache_salt)


def layout(obj: MemoryObj) -> str:
    """Shapes and dtypes of an object, as the frame names them."""
    shapes = [list(shape) for shape in obj.get_shapes()]
    return f"{shapes} {' '.join(str(dtype).replace('torch.', '') for dtype in obj.get_dtypes())}"


def memory(address: int, length: int) -> memoryview:
    """The bytes at an address; valid as long as the object that owns them."""
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def _scratch(length: int) -> memoryview:
    """Zeroed bytes that start on a page."""
    return memoryview(mmap.mmap(-1, max(length, chunkfile.PAGE_BYTES)))[: max(length, 0)]


class _Batch:
    """One task: its keys are worked on in parallel, and the last one reports."""

    def __init__(self, size: int, done: Callable[[list[Any]], None]) -> None:
        self.results: list[Any] = [None] * size
        self.left = size
        self.lock = threading.Lock()
        self.done = done

    def finish(self, position: int, result: Any) -> None:
        with self.lock:
            self.results[position] = result
            self.left -= 1
            last = self.left == 0
        if last:
            self.done(self.results)


class StoreAdapter(L2AdapterInterface):
    """See the module. Thread-safe; every submitted task completes, whatever the disk does."""

    def __init__(self, config: StoreAdapterConfig, l1_memory_desc: Optional[L1MemoryDesc] = None) -> None:
        super().__init__(max_capacity_bytes=config.budget_bytes)
        self._config = config
        self._lock_file = self._lock_root(config.root)
        started = time.monotonic()
        self.store = Store(
            config.root,
            config.live,
            config.budget_bytes,
            config.reserve_bytes,
            config.trigger_watermark,
            config.eviction_ratio,
            config.quotas,
        )
        self.index_saved = self.store.open()
        self.index_seconds = time.monotonic() - started
        self.counts: Counter[str] = Counter()
        self._direct = self._probe_direct()
        self._store_efd = create_event_notifier()
        self._lookup_efd = create_event_notifier()
        self._load_efd = create_event_notifier()
        self._tasks = threading.Lock()
        self._next_task_id: L2TaskId = 0
        self._stored: dict[L2TaskId, L2StoreResult] = {}
        self._looked_up: dict[L2TaskId, Bitmap] = {}
        self._loaded: dict[L2TaskId, Bitmap] = {}
        self._writing: set[ChunkKey] = set()
        self._unreadable: set[ChunkKey] = set()
        self._damaged: set[ChunkKey] = set()
        self._gate: tuple[int, str] = (0, "closed")
        self._closed_since: Optional[float] = None
        self._closing = False
        self._scanner: Optional[threading.Thread] = None
        self._pages = threading.local()
        # Two pools: a request waits for its loads, and they do not wait for stores.
        self._storing = ThreadPoolExecutor(config.threads, thread_name_prefix="kvpersist-store")
        self._loading = ThreadPoolExecutor(config.threads, thread_name_prefix="kvpersist-load")
        self._register_metrics()
        usage = self.store.usage()
        if guard.install():
            logger.info("kvpersist guard: figures for all, the rest of the HTTP port for root and uid %d", os.getuid())
        else:
            logger.warning("kvpersist guard: no HTTP server was found to guard")
        logger.info(
            "kvpersist store: %d chunks, %d bytes live, %d bytes of others, budget %d, indexed in %.2f s%s, %s",
            self.store.index.count,
            usage.live,
            usage.total() - usage.live,
            config.budget_bytes,
            self.index_seconds,
            " as it was saved" if self.index_saved else "",
            "O_DIRECT" if self._direct else "buffered: the file system refuses O_DIRECT",
        )

    # -- the gate ---------------------------------------------------------------------------

    def _admitted(self) -> bool:
        """Whether the gate is open; without a gate file it always is.

        What the gate wrote is read again when its file changed. No file, or one that cannot be
        read, is a closed gate. A gate that admits another model makes that the live one.
        """
        path = self._config.gate_file
        if not path:
            return True
        try:
            stamp = os.stat(path).st_mtime_ns
            if stamp != self._gate[0]:
                with open(path, encoding="utf-8") as file:
                    seen = json.load(file)
                if seen["gate"] == "open" and not self.store.is_live(seen["model"]):
                    logger.warning("kvpersist store: %s is served now", seen["model"])
                    self.store.serve(seen["model"])
                    self._rescan()
                self._gate = (stamp, str(seen["gate"]))
                self._closed_since = None
        except (OSError, ValueError, KeyError, TypeError):
            self._gate = (0, "closed")
        return self._gate[1] == "open"

    def _admitted_soon(self) -> bool:
        """Like :meth:`_admitted`, but a gate that is found closed gets GATE_SECONDS to open, once after each change."""
        while not self._admitted():
            now = time.monotonic()
            since = self._closed_since  # another thread may see the gate change, and set it to None
            if since is None:
                self._closed_since = since = now
            if self._closing or now - since > GATE_SECONDS:
                return False
            time.sleep(0.1)
        return True

    def _admitted_before(self) -> bool:
        """Whether what was given while the gate was open may still be stored.

        A vLLM that ends takes leave, which closes the gate; its last chunks may lie in the queue then.
        """
        return self._admitted() or self._gate[1] == "closed"

    def _rescan(self) -> None:
        """Read the root again, beside what else is going on."""
        with self._tasks:
            if self._scanner is None or not self._scanner.is_alive():
                self._scanner = threading.Thread(target=self.store.scan, name="kvpersist-scan", daemon=True)
                self._scanner.start()

    # -- metrics ------------------------------------------------------------------------------

    def _register_metrics(self) -> None:
        """On the server's own /metrics."""

        def counted(prefix: str) -> list[tuple[int, dict[str, object]]]:
            counts = dict(self.counts)
            return [(n, {"reason": name[len(prefix) :]}) for name, n in counts.items() if name.startswith(prefix)]

        usage = self.store.usage
        gauges: dict[str, tuple[str, Callable[[], Any]]] = {
            "kvp_disk_bytes": (
                "Disk bytes of the cache root.",
                lambda: [(n, {"class": c}) for c, n in vars(usage()).items()],
            ),
            "kvp_budget_bytes": ("Disk budget of the cache root.", lambda: self._config.budget_bytes),
            "kvp_limit_bytes": (
                "What the root may take now: budget, or free space above the reserve.",
                self.store.limit,
            ),
            "kvp_chunks": ("Chunks of the live namespaces.", lambda: self.store.index.count),
            "kvp_evicted_chunks": ("Chunks evicted since the server started.", lambda: self.store.evicted),
            "kvp_refused_stores": ("Chunks that were not stored.", lambda: counted("refused_")),
            "kvp_failed_stores": ("Chunks whose write failed.", lambda: counted("failed_stores_")),
            "kvp_failed_loads": ("Chunks whose read failed.", lambda: counted("failed_loads_")),
            "kvp_checksum_misses": ("Damaged chunks that were moved aside.", lambda: self.counts["checksum_misses"]),
            "kvp_healed_chunks": ("Damaged chunks that were stored again.", lambda: self.counts["healed"]),
            "kvp_raw_bytes": ("Bytes given to the codec.", lambda: self.counts["raw_bytes"]),
            "kvp_stored_bytes": ("Bytes that the codec made of them.", lambda: self.counts["stored_bytes"]),
            "kvp_index_saved": (
                "1 when the index was taken as the last server saved it.",
                lambda: int(self.index_saved),
            ),
            "kvp_index_seconds": ("Time that reading the root took at the start.", lambda: self.index_seconds),
            "kvp_admitted": ("1 when the gate lets this server store and load.", lambda: int(self._admitted())),
        }
        for name, (text, function) in gauges.items():
            register_gauge("kvpersist", name, text, function)

    # -- one server per root ---------------------------------------------------------------

    @staticmethod
    def _lock_root(root: str) -> int:
        os.makedirs(os.path.join(root, QUARANTINE_DIR), mode=0o700, exist_ok=True)
        # Read-only: an open file that could be written would keep the disk from a read-only remount.
        file = os.open(os.path.join(root, PRODUCT_DIR, "lock"), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise ValueError(f"adapter_params: root is {root!r}, which another lmcache server has open") from None
        return file

    def _probe_direct(self) -> bool:
        """Whether the file system opens files with O_DIRECT. Writes nothing: the disk may be full."""
        try:
            os.close(os.open(os.path.join(self._config.root, PRODUCT_DIR, "lock"), os.O_RDONLY | os.O_DIRECT))
        except OSError:
            return False
        return True

    # -- event fds ---------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._store_efd.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookup_efd.fileno()

    def get_load_event_fd(self) -> int:
        return self._load_efd.fileno()

    def _task_id(self) -> L2TaskId:
        with self._tasks:
            self._next_task_id += 1
            return self._next_task_id

    # -- store -------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        task = self._task_id()

        def done(sizes: list[Optional[int]]) -> None:
            written = [(key, size) for key, size in zip(keys, sizes) if size]
            if written:
                self._notify_keys_stored([key for key, _ in written], [size for _, size in written])
            with self._tasks:
                success = all(size is not None for size in sizes)
                self._stored[task] = L2StoreResult(success, sum(size for _, size in written) if success else 0)
            self._store_efd.notify()

        may_store = self._admitted_before if self._admitted() else self._admitted_soon
        self._submit(self._storing, keys, objects, lambda key, obj: self._store_one(key, obj, may_store), done)
        return task

    def _submit(
        self,
        workers: ThreadPoolExecutor,
        keys: list[ObjectKey],
        objs: list[MemoryObj],
        work: Callable[[ChunkKey, MemoryObj], Any],
        done: Callable[[list[Any]], None],
    ) -> None:
        if not keys:
            done([])
            return
        batch = _Batch(len(keys), done)

        def run(position: int, key: ObjectKey, obj: MemoryObj) -> None:
            try:
                result = work(chunk_key(key), obj)
            except Exception:  # a task that never completes would hold a request for ever
                logger.exception("kvpersist store: %s", key)
                self.counts["internal_errors"] += 1
                result = None
            batch.finish(position, result)

        for position, (key, obj) in enumerate(zip(keys, objs)):
            workers.submit(run, position, key, obj)

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        with self._tasks:
            done, self._stored = self._stored, {}
        return done

    def _store_one(self, key: ChunkKey, obj: MemoryObj, may_store: Callable[[], bool]) -> Optional[int]:
        """Disk bytes written; 0 when the chunk is there already, None when it could not be stored."""
        if not may_store():
            return self._refused("gate")
        if not self.store.is_live(key.model_name):
            return self._refused("namespace")
        if len(os.fsencode(chunkfile.file_name(key))) + TEMP_BYTES > chunkfile.NAME_MAX:
            return self._refused("name")
        with self._tasks:
            if key in self._writing or key in self._unreadable:
                return 0
            if self.store.has(key):
                return 0
            self._writing.add(key)
        try:
            return self._write(key, obj)
        finally:
            with self._tasks:
                self._writing.discard(key)

    def _refused(self, reason: str) -> None:
        self.counts[f"refused_{reason}"] += 1

    def _write(self, key: ChunkKey, obj: MemoryObj) -> Optional[int]:
        raw = obj.get_size()
        body, frame = self._body(obj, raw), Frame(key, layout(obj), "none", raw, raw)
        if self._config.codec != "none" and raw % 2 == 0:
            stored = codecs.encode(self._config.codec, memory(obj.data_ptr, raw))
            if chunkfile.padded(len(stored)) < chunkfile.padded(raw):  # else it stays as it is
                frame = Frame(key, layout(obj), self._config.codec, raw, len(stored))
                body = _scratch(chunkfile.padded(len(stored)))
                body[: len(stored)] = stored
        if self.store.stale():
            self._rescan()
        if not self.store.promise(frame.file_bytes, key.model_name):
            return self._refused("budget")
        path = self.store.path(key)
        temp = f"{path}.tmp.{uuid.uuid4().hex}"
        size = None
        self.store.writing.add(os.path.basename(temp))
        try:
            page = self._page()
            page[:] = frame.sealed(body[: frame.stored_length], crc32c)
            size = self._publish(temp, path, [page, body])
            if key in self._damaged:
                self._damaged.discard(key)
                self.counts["healed"] += 1
            self.counts["raw_bytes"] += raw
            self.counts["stored_bytes"] += frame.stored_length
        except OSError as error:
            self.counts[f"failed_stores_{errno.errorcode.get(error.errno or 0, 'other')}"] += 1
            logger.warning("kvpersist store: %s was not stored: %s", os.path.basename(path), error)
            with contextlib.suppress(OSError):
                os.unlink(temp)
        finally:
            self.store.writing.discard(os.path.basename(temp))
            if size is None:
                self.store.give_back(frame.file_bytes)
            else:
                self.store.keep(key, frame.file_bytes, size)
        return size

    def _publish(self, temp: str, path: str, parts: list[memoryview]) -> int:
        """Write all parts, make them durable as asked for, and give them their name; disk bytes."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)
        file = os.open(temp, flags, 0o600)
        try:
            wanted = sum(map(len, parts))
            written = os.pwritev(file, parts, 0)
            while written < wanted:  # a short write ends on a page under O_DIRECT
                rest, at = [], written
                for part in parts:
                    rest += [part[at:]] if at < len(part) else []
                    at = max(at - len(part), 0)
                written += os.pwritev(file, rest, written)
            if self._config.fsync != "none":
                os.fdatasync(file)
            size = os.fstat(file).st_blocks * 512
        finally:
            os.close(file)
        os.rename(temp, path)
        if self._config.fsync == "file+dir":
            directory = os.open(self._config.root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        return size

    def _page(self) -> memoryview:
        """A page of this thread's own, aligned for O_DIRECT."""
        if not hasattr(self._pages, "page"):
            self._pages.page = memoryview(mmap.mmap(-1, chunkfile.HEADER_BYTES))
        return self._pages.page

    def _body(self, obj: MemoryObj, raw: int) -> memoryview:
        """The object's bytes up to whole pages, in place where its memory reaches so far."""
        whole = chunkfile.padded(raw)
        if self._reaches(obj, raw):
            return memory(obj.data_ptr, whole)
        copy = _scratch(whole)
        copy[:raw] = memory(obj.data_ptr, raw)
        return copy

    # -- lookup ------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        task = self._task_id()
        if self._admitted():
            self._look_up(task, keys, True)
        else:
            self._loading.submit(lambda: self._look_up(task, keys, self._admitted_soon()))  # which raises nothing
        return task

    def _look_up(self, task: L2TaskId, keys: list[ObjectKey], is_admitted: bool) -> None:
        found = Bitmap(len(keys))
        used = []
        for position, key in enumerate(keys if is_admitted else ()):
            chunk = chunk_key(key)
            if self.store.pin(chunk):
                found.set(position)
                used.append(chunk)
        if used:
            self._storing.submit(self.store.stamp, used)
        with self._tasks:
            self._looked_up[task] = found
        self._lookup_efd.notify()

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        with self._tasks:
            return self._looked_up.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        for key in keys:
            self.store.unpin(chunk_key(key))

    # -- load --------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        task = self._task_id()

        def done(results: list[Optional[bool]]) -> None:
            loaded = Bitmap(len(keys))
            good = [position for position, result in enumerate(results) if result]
            for position in good:
                loaded.set(position)
            if good:
                self._notify_keys_accessed([keys[position] for position in good])
            with self._tasks:
                self._loaded[task] = loaded
            self._load_efd.notify()

        self._submit(self._loading, keys, objects, self._load_one, done)
        return task

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        with self._tasks:
            return self._loaded.pop(task_id, None)

    def _load_one(self, key: ChunkKey, obj: MemoryObj) -> bool:
        """Whether the object has the chunk's bytes now. Whatever is wrong is a miss of this chunk alone."""
        path = self.store.path(key)
        try:
            self._read(path, key, obj)
            return True
        except UnknownFrame as error:
            self.counts["unknown_frames"] += 1
            logger.warning("kvpersist store: %s: %s; kept", os.path.basename(path), error)
            with self._tasks:
                self._unreadable.add(key)
            self._dropped(key, self.store.set_aside(key))
        except FrameError as error:
            self.counts["checksum_misses"] += 1
            logger.error("kvpersist store: %s: %s; moved to quarantine", os.path.basename(path), error)
            self._damaged.add(key)
            self._quarantine(key, path)
        except FileNotFoundError:
            self.counts["missing_files"] += 1
            self._dropped(key, self.store.forget(key))
        except OSError as error:
            self.counts[f"failed_loads_{errno.errorcode.get(error.errno or 0, 'other')}"] += 1
            logger.error("kvpersist store: %s cannot be read: %s", os.path.basename(path), error)
            self._dropped(key, self.store.set_aside(key))
        return False

    def _read(self, path: str, key: ChunkKey, obj: MemoryObj) -> None:
        """Fill the object with the chunk. Raises FrameError, UnknownFrame or OSError; then its bytes are undefined."""
        raw = obj.get_size()
        whole = chunkfile.HEADER_BYTES + chunkfile.padded(raw)
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if self._direct else 0))
        try:
            length = os.fstat(file).st_size
            # Before anything is allocated for it.
            if not chunkfile.HEADER_BYTES <= length <= whole or length % chunkfile.PAGE_BYTES:
                raise FrameError(f"the file has {length} bytes, whole pages up to {whole} are asked for")
            in_place = length == whole and self._reaches(obj, raw)
            body = (
                memory(obj.data_ptr, chunkfile.padded(raw)) if in_place else _scratch(length - chunkfile.HEADER_BYTES)
            )
            page = self._page()
            got = os.preadv(file, [page, body], 0)
            while chunkfile.HEADER_BYTES <= got < length:
                more = os.preadv(file, [body[got - chunkfile.HEADER_BYTES :]], got)
                if more == 0:
                    break
                got += more
        finally:
            os.close(file)
        frame = chunkfile.read_header(page[: min(got, chunkfile.HEADER_BYTES)])
        chunkfile.expect(frame, key, layout(obj), raw)
        chunkfile.check(frame, length, page, body[: max(got - chunkfile.HEADER_BYTES, 0)], crc32c)
        stored = body[: frame.stored_length]
        if frame.codec == "none":
            if not in_place:
                memory(obj.data_ptr, raw)[:] = stored
            return
        try:
            codecs.decode(frame.codec, memoryview(bytes(stored)) if in_place else stored, memory(obj.data_ptr, raw))
        except ValueError as error:
            raise FrameError(str(error)) from None

    @staticmethod
    def _reaches(obj: MemoryObj, raw: int) -> bool:
        """Whether the object's memory is aligned and reaches to the end of the last page."""
        return obj.get_physical_size() >= chunkfile.padded(raw) and obj.data_ptr % chunkfile.PAGE_BYTES == 0

    def _dropped(self, key: ChunkKey, size: int) -> None:
        if size:
            self._notify_keys_deleted([_object_key(key)], [size])

    def _quarantine(self, key: ChunkKey, path: str) -> None:
        """Move a damaged file aside; the oldest leave once they take more than their share."""
        directory = os.path.join(self._config.root, QUARANTINE_DIR)
        try:
            os.rename(path, os.path.join(directory, f"{os.path.basename(path)}.{time.time_ns()}"))
        except OSError as error:
            logger.error("kvpersist store: %s could not be moved aside: %s", os.path.basename(path), error)
            self._dropped(key, self.store.set_aside(key))
            return
        self._dropped(key, self.store.forget(key, to_quarantine=True))
        with self.store.lock:
            held = sorted(
                (entry.stat(follow_symlinks=False).st_mtime_ns, entry.path) for entry in os.scandir(directory)
            )
            sizes = {path: os.stat(path, follow_symlinks=False).st_blocks * 512 for _, path in held}
            total = sum(sizes.values())
            for _, oldest in held[:-1]:
                if total <= self._config.budget_bytes * QUARANTINE_SHARE:
                    break
                os.unlink(oldest)
                total -= sizes[oldest]
                self.store.other.quarantine -= sizes[oldest]

    # -- the rest of the interface -------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        deleted, sizes = [], []
        for key in keys:
            chunk = chunk_key(key)
            with self.store.lock:
                size = self.store.index.get(chunk)
                if size is None or chunkfile.file_name(chunk) in self.store.pinned:
                    continue
                try:
                    os.unlink(self.store.path(chunk))
                except FileNotFoundError:
                    pass
                except OSError:
                    continue
                self.store.forget(chunk)
            deleted.append(key)
            sizes.append(size)
        if deleted:
            self._notify_keys_deleted(deleted, sizes)

    def get_usage(self) -> AdapterUsage:
        return AdapterUsage(self.store.usage().total(), self._config.budget_bytes)

    def report_status(self) -> dict[str, Any]:
        usage = self.store.usage()
        return {
            "is_healthy": True,
            "type": "kvpersist",
            "stored_object_count": self.store.index.count,
            "pinned_object_count": len(self.store.pinned),
            "evicted_object_count": self.store.evicted,
            "direct_io": self._direct,
            "index_seconds": self.index_seconds,
            "budget_bytes": self._config.budget_bytes,
            "disk_bytes": vars(usage),
            "counts": dict(self.counts),
        }

    def close(self) -> None:
        self._closing = True
        self._loading.shutdown(wait=True)  # first: it hands work to the other
        self._storing.shutdown(wait=True)
        self.store.save()
        for notifier in (self._store_efd, self._lookup_efd, self._load_efd):
            notifier.close()
        os.close(self._lock_file)


def _object_key(key: ChunkKey) -> ObjectKey:
    return ObjectKey(key.chunk_hash, key.model_name, key.kv_rank, key.object_group, key.salt)
