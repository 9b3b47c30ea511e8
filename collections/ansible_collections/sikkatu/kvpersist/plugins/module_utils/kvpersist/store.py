"""A cache root: what lies in it, what it takes on the disk, and what leaves first.

Sizes are disk bytes (allocated blocks). Only chunks of the live namespaces are ever evicted;
everything else in the root is counted, and left to ``kvp-admin cleanup``. Opening a store
deletes nothing, however full it is.

The last use of a chunk is the modification time of its file, so that it outlives restarts and
every tool sees the same order.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import struct
import threading
import time
import zlib
from array import array
from dataclasses import asdict, dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

from .objects import ChunkKey, base_model, file_name, is_temp, spelled, split_hash, split_name

#: Product files live below the root in here; quarantine is a directory of it.
PRODUCT_DIR = ".kvpersist"
QUARANTINE_DIR = f"{PRODUCT_DIR}/quarantine"
#: The index as it was when the server stopped.
INDEX_FILE = f"{PRODUCT_DIR}/index"
#: ``kvp-admin cleanup`` touches it: what the server counted is not true any more.
CHANGED_FILE = f"{PRODUCT_DIR}/changed"

#: Among the live names: every one.
ALL_NAMESPACES = "*"

#: A use is written to the file at most this often (seconds).
TOUCH_SECONDS = 60.0
#: What is read at once of the saved index.
READ_BYTES = 1 << 20
#: Sets that leave at once.
EVICTION_BATCH = 64
#: A root that others may have emptied is read again at most this often (seconds).
RESCAN_SECONDS = 60.0
#: And it waits this many times as long as that took.
RESCAN_SHARE = 100.0

_MEMBER = struct.Struct("<IHQ")  # kv_rank, object group, disk bytes
_INDEX_VERSION = 1


@dataclass
class Usage:
    """Disk bytes by class."""

    live: int = 0
    dead: int = 0
    foreign: int = 0
    temp: int = 0
    quarantine: int = 0

    def total(self) -> int:
        return self.live + self.dead + self.foreign + self.temp + self.quarantine


class Index:
    """Chunks of the live namespaces, oldest first, by whole sets (chunk x rank x group).

    A set is one entry of a dictionary, packed: a million files take less than 250 MB.
    """

    def __init__(self) -> None:
        self.sets: Dict[bytes, bytes] = {}
        self.names: List[str] = []
        self.model_bytes: List[int] = []
        self.count = 0
        self._numbers: Dict[str, int] = {}

    def total(self) -> int:
        """Disk bytes of all chunks."""
        return sum(self.model_bytes)

    def bytes_of(self, model_name: str) -> int:
        """Disk bytes of one model name's chunks."""
        number = self._numbers.get(spelled(model_name))
        return 0 if number is None else self.model_bytes[number]

    def set_name(self, model_name: str, chunk_hash: bytes, salt: str) -> bytes:
        """What a set is found by: number of the model name, length of the hash, hash, salt."""
        model_name = spelled(model_name)
        number = self._numbers.get(model_name)
        if number is None:
            number = self._numbers[model_name] = len(self.names)
            self.names.append(model_name)
            self.model_bytes.append(0)
        return b"%c%c%c" % (number >> 8, number & 255, len(chunk_hash)) + chunk_hash + os.fsencode(salt)

    def _set(self, key: ChunkKey) -> bytes:
        return self.set_name(key.model_name, key.chunk_hash, key.salt)

    def get(self, key: ChunkKey) -> Optional[int]:
        """Disk bytes of the chunk's file, None when it is not here."""
        members = self.sets.get(self._set(key))
        if members is not None:
            for rank, group, size in _MEMBER.iter_unpack(members):
                if rank == key.kv_rank and group == key.object_group:
                    return int(size)
        return None

    def add(self, key: ChunkKey, disk_bytes: int) -> None:
        """Add a chunk, or give it another size; its set becomes the newest."""
        self.discard(key)
        self.append(self._set(key), _MEMBER.pack(key.kv_rank, key.object_group, disk_bytes), disk_bytes)

    def append(self, name: bytes, member: bytes, disk_bytes: int) -> None:
        """Add a packed member that is not here yet to the set of that name, which becomes the newest."""
        members = self.sets.pop(name, None)
        self.sets[name] = member if members is None else members + member
        self.model_bytes[name[0] << 8 | name[1]] += disk_bytes
        self.count += 1

    def discard(self, key: ChunkKey) -> int:
        """Forget a chunk; its disk bytes, 0 when it was not here."""
        name = self._set(key)
        members = self.sets.get(name, b"")
        for at in range(0, len(members), _MEMBER.size):
            rank, group, size = _MEMBER.unpack_from(members, at)
            if (rank, group) == (key.kv_rank, key.object_group):
                left = members[:at] + members[at + _MEMBER.size :]
                if left:
                    self.sets[name] = left
                else:
                    del self.sets[name]
                self.model_bytes[name[0] << 8 | name[1]] -= size
                self.count -= 1
                return int(size)
        return 0

    def touch(self, key: ChunkKey) -> bool:
        """Make the chunk's set the newest; False when the chunk is not here."""
        name = self._set(key)
        members = self.sets.get(name)
        if members is None:
            return False
        if len(members) == _MEMBER.size:  # the usual set has one member
            rank, group, _ = _MEMBER.unpack(members)
            here = bool(rank == key.kv_rank and group == key.object_group)
        else:
            here = self.get(key) is not None
        if here:
            del self.sets[name]
            self.sets[name] = members
        return here

    def oldest_sets(self, model_name: str = "") -> Iterator[List[Tuple[ChunkKey, int]]]:
        """Whole sets with their disk bytes, oldest first, of one model name or of all."""
        number = self._numbers.get(spelled(model_name))
        for name, members in self.sets.items():
            if model_name and number != name[0] << 8 | name[1]:
                continue
            model, end = self.names[name[0] << 8 | name[1]], 3 + name[2]
            chunk_hash, salt = name[3:end], os.fsdecode(name[end:])
            yield [
                (ChunkKey(model, chunk_hash, rank, group, salt), int(size))
                for rank, group, size in _MEMBER.iter_unpack(members)
            ]


def walk(root: str, skip: Iterable[str] = ()) -> Iterator[Tuple[str, os.stat_result]]:
    """Name and status of every entry of the root itself that is there and not in ``skip``."""
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.scandir(top) as entries:
            for entry in entries:
                if entry.name in skip:
                    continue
                try:
                    yield entry.name, entry.stat(follow_symlinks=False)
                except OSError:
                    continue
    finally:
        os.close(top)


class _Found:
    """Chunks while the root is read: a few bytes each, in buffers that are given back as a whole."""

    def __init__(self) -> None:
        self._kinds: List[Tuple[str, str, int, int, int]] = []
        self._numbers: Dict[Tuple[str, str, int, int, int], int] = {}
        self._used, self._at = array("Q"), array("Q")
        self._kind, self._blocks = array("I"), array("Q")
        self._hashes = bytearray()

    def kind(self, model: str, salt: str, rank: int, group: int, hash_bytes: int) -> int:
        """Number of what a name has beside its hash."""
        key = (model, salt, rank, group, hash_bytes)
        number = self._numbers.setdefault(key, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(key)
        return number

    def add(self, kind: int, chunk_hash: bytes, seen: os.stat_result) -> None:
        self._used.append(max(seen.st_mtime_ns, 0))
        self._at.append(len(self._hashes))
        self._kind.append(kind)
        self._blocks.append(seen.st_blocks)
        self._hashes += chunk_hash

    def oldest_first(self) -> Iterator[Tuple[str, str, int, int, bytes, int]]:
        """Model name, salt, rank, group, hash and disk bytes of each chunk."""
        order = array("I", sorted(range(len(self._used)), key=self._used.__getitem__))
        for number in order:
            model, salt, rank, group, hash_bytes = self._kinds[self._kind[number]]
            at = self._at[number]
            chunk_hash = bytes(self._hashes[at : at + hash_bytes])
            yield model, salt, rank, group, chunk_hash, self._blocks[number] * 512


class Store:
    """The files of one cache root, for one server.

    ``budget_bytes`` bounds everything in the root, ``reserve_bytes`` of the file system stay
    free, ``quotas`` bound single model names. ``trigger_watermark`` and ``eviction_ratio`` are
    shares of each limit.
    """

    def __init__(
        self,
        root: str,
        live: Iterable[str],
        budget_bytes: int,
        reserve_bytes: int = 0,
        trigger_watermark: float = 0.9,
        eviction_ratio: float = 0.1,
        quotas: Optional[Mapping[str, int]] = None,
        free_bytes: Optional[Callable[[], int]] = None,
    ) -> None:
        self.root = root
        self.live = frozenset(map(spelled, live))
        self.budget_bytes = budget_bytes
        self.reserve_bytes = reserve_bytes
        self.trigger_watermark = trigger_watermark
        self.eviction_ratio = eviction_ratio
        self.quotas = {spelled(name): size for name, size in (quotas or {}).items()}
        self.lock = threading.RLock()
        self.index = Index()
        self.other = Usage()
        #: How often the chunk of a file name is in use.
        self.pinned: Dict[str, int] = {}
        self.promised = 0
        self.evicted = 0
        #: Disk bytes of files that stay under their names, but hold nothing that can be read.
        self.aside: Dict[ChunkKey, int] = {}
        #: Names of the files that are being written.
        self.writing: Set[str] = set()
        #: What happened to the index while the root is being read; None when it is not.
        self._journal: Optional[List[Tuple[ChunkKey, Optional[int]]]] = None
        self._undeletable: Set[ChunkKey] = set()
        #: The live names that the index was made for.
        self._indexed_live = self.live
        self._refused = False
        self._scanned_at = 0.0
        self._scan_seconds = 0.0
        self._changed_ns = 0
        self._index_file_bytes = 0
        #: Entries of the root that are no chunk of the index.
        self._others = 0
        self._touched: Set[ChunkKey] = set()
        self._touched_since = 0.0
        self._free_bytes = free_bytes or self._free_on_disk

    # -- what is there -------------------------------------------------------------------

    def is_live(self, model_name: str) -> bool:
        return ALL_NAMESPACES in self.live or base_model(spelled(model_name)) in self.live

    def serve(self, model_name: str) -> None:
        """Make this the live name. The chunks of another are out of reach at once; its own come with a :meth:`scan`."""
        with self.lock:
            self.live = frozenset([spelled(model_name)])
            self.other.dead += self.index.total()
            self.index = Index()

    def path(self, key: ChunkKey) -> str:
        return os.path.join(self.root, file_name(key))

    def open(self) -> bool:
        """Take the saved index when the root is as it was left, else read the root; whether it was saved."""
        if self._load():
            return True
        self.scan()
        return False

    def scan(self) -> None:
        """Read the root: the live chunks in age order, everything else as bytes. Deletes nothing.

        The store may be used meanwhile, from other threads. When another name becomes the live
        one meanwhile, it is read again.
        """
        self._scan()
        while self._journal is None and self._indexed_live != self.live:
            self._scan()

    def _scan(self) -> None:
        with self.lock:
            if self._journal is not None:
                return
            self._journal = []
        started = time.monotonic()
        try:
            changed_ns, live = self._changed_stamp(), self.live
            index, other, others = self._read()
            with self.lock:
                self._indexed_live = live
                if live != self.live:
                    return
                for key, size in self._journal:
                    if size is None:
                        index.discard(key)
                    else:
                        index.add(key, size)
                self.index, self.other, self._others = index, other, others
                self.aside.clear()
                self._undeletable.clear()
                self._changed_ns, self._refused = changed_ns, False
                self._index_file_bytes = _disk_bytes(os.path.join(self.root, INDEX_FILE))
        finally:
            self._scanned_at = time.monotonic()
            self._scan_seconds = self._scanned_at - started
            self._journal = None

    def _read(self) -> Tuple[Index, Usage, int]:
        """Chunks of the root by age, bytes of everything else, and how many entries that is."""
        found, other, others = _Found(), Usage(), 0
        index = Index()
        lives: Dict[str, bool] = {}
        # Most names differ from an earlier one in the hash alone; those need not be taken apart again.
        heads: Dict[str, Tuple[int, int]] = {}
        for name, seen in walk(self.root, self.writing):
            regular = stat.S_ISREG(seen.st_mode)
            head, _, tail = name.rpartition("_")
            known = heads.get(head)
            chunk_hash = split_hash(tail) if known is not None and regular else None
            if known is not None and chunk_hash is not None and len(chunk_hash) == known[1]:
                found.add(known[0], chunk_hash, seen)
                continue
            others += 1
            size = seen.st_blocks * 512
            parts = split_name(name) if regular else None
            if parts is not None:
                model, chunk_hash, rank, group, salt = parts
                live = lives.get(model)
                if live is None:
                    live = lives[model] = self.is_live(model)
                if not live or group > 0xFFFF:
                    other.dead += size
                    continue
                kind = found.kind(model, salt, rank, group, len(chunk_hash))
                if not salt:
                    heads[head] = (kind, len(chunk_hash))
                found.add(kind, chunk_hash, seen)
                others -= 1
            elif stat.S_ISDIR(seen.st_mode):
                self._read_directory(name, other)
            elif is_temp(name):
                other.temp += size
            else:
                other.foreign += size
        for model, salt, rank, group, chunk_hash, size in found.oldest_first():
            index.append(index.set_name(model, chunk_hash, salt), _MEMBER.pack(rank, group, size), size)
        return index, other, others

    def _read_directory(self, name: str, other: Usage) -> None:
        for directory, _, files in os.walk(os.path.join(self.root, name)):
            size = sum(_disk_bytes(os.path.join(directory, file)) for file in files)
            if directory == os.path.join(self.root, QUARANTINE_DIR):
                other.quarantine += size
            else:
                other.foreign += size

    def _changed_stamp(self) -> int:
        try:
            return os.stat(os.path.join(self.root, CHANGED_FILE)).st_mtime_ns
        except OSError:
            return 0

    def usage(self) -> Usage:
        with self.lock:
            seen = self.other
            foreign = seen.foreign + sum(self.aside.values())
            return Usage(self.index.total(), seen.dead, foreign, seen.temp, seen.quarantine)

    def limit(self) -> int:
        """Bytes that the root may take now: the budget, or what the disk has above the reserve."""
        with self.lock:
            here = self.usage().total()
        return min(self.budget_bytes, here + self._free_bytes() - self.reserve_bytes)

    def _free_on_disk(self) -> int:
        shown = os.statvfs(self.root)
        return shown.f_bavail * shown.f_frsize

    # -- the saved index -----------------------------------------------------------------

    def _stamps(self) -> Dict[str, Any]:
        """What changes with any file that comes to the root or leaves it."""
        seen = os.stat(self.root)
        quarantine = os.stat(os.path.join(self.root, QUARANTINE_DIR))
        return {
            "version": _INDEX_VERSION,
            "root": [seen.st_dev, seen.st_ino, seen.st_mtime_ns],
            "quarantine": quarantine.st_mtime_ns,
            "changed": self._changed_stamp(),
            "live": sorted(self.live),
        }

    def _others_changed(self) -> bool:
        """Whether somebody else brought files to the root, or took some away, since it was read."""
        with os.scandir(self.root) as entries:
            return sum(1 for _ in entries) != self.index.count + self._others

    def save(self) -> None:
        """Write the index for the next start; a file that cannot be written only costs that start a scan.

        One line of JSON, then lengths and texts of the sets. For a store that is not used any more.
        """
        path = os.path.join(self.root, INDEX_FILE)
        with self.lock:
            try:
                stamps = self._stamps()  # before the entries are counted: what comes later changes them
                others_changed = self._others_changed()
            except OSError:
                return
            # What is known not to be as it is on the disk is no index for the next start.
            outdated = self._journal is not None or self._indexed_live != self.live
            if self.aside or outdated or others_changed or stamps["changed"] != self._changed_ns:
                with contextlib.suppress(OSError):
                    os.unlink(path)
                return
            sets = self.index.sets
            lengths = [array("H", map(len, sets.keys())), array("I", map(len, sets.values()))]
            body = b"".join([*(part.tobytes() for part in lengths), *sets.keys(), *sets.values()])
            other = asdict(self.other)
            other["foreign"] = max(other["foreign"] - self._index_file_bytes, 0)
            try:
                head = {
                    **stamps,
                    "names": self.index.names,
                    "model_bytes": self.index.model_bytes,
                    "count": self.index.count,
                    "others": self._others,
                    "sets": len(sets),
                    "other": other,
                }
                head["crc"] = zlib.crc32(body, zlib.crc32(_canonical(head)))
                with open(f"{path}.part", "wb") as file:
                    os.fchmod(file.fileno(), 0o600)
                    file.write(json.dumps(head).encode() + b"\n")
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(f"{path}.part", path)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(f"{path}.part")

    def _load(self) -> bool:
        """Take the saved index. False when there is none, or none that is whole and of this root as it is."""
        path = os.path.join(self.root, INDEX_FILE)
        try:
            with open(path, "rb") as file:
                head = json.loads(file.readline())
                stamps = self._stamps()
                if any(head[key] != value for key, value in stamps.items()):
                    return False
                wanted = head.pop("crc")
                start, crc = file.tell(), zlib.crc32(_canonical(head))
                for piece in iter(lambda: file.read(READ_BYTES), b""):
                    crc = zlib.crc32(piece, crc)
                if crc != wanted:
                    return False
                file.seek(start)
                index, keys, members = Index(), array("H"), array("I")
                for lengths in (keys, members):
                    lengths.frombytes(file.read(head["sets"] * lengths.itemsize))
                with open(path, "rb") as texts:  # the members stand behind the keys
                    texts.seek(file.tell() + sum(keys))
                    index.sets = {file.read(key): texts.read(member) for key, member in zip(keys, members)}
            for name in head["names"]:
                index.set_name(name, b"", "")
            index.model_bytes = list(head["model_bytes"])
            index.count = int(head["count"])
            other = Usage(**head["other"])
            others = int(head["others"])
        except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
            return False
        with self.lock:
            self.index, self.other, self._others = index, other, others
            self._index_file_bytes = _disk_bytes(path)
            self.other.foreign += self._index_file_bytes
            self._changed_ns = stamps["changed"]
            self._scanned_at = time.monotonic()
        return True

    # -- use -----------------------------------------------------------------------------

    def has(self, key: ChunkKey) -> bool:
        with self.lock:
            return self.index.get(key) is not None

    def pin(self, key: ChunkKey) -> bool:
        """Keep a chunk from eviction until :meth:`unpin`; it was used just now. False when it is not here."""
        with self.lock:
            if not self.index.touch(key):
                return False
            name = file_name(key)
            self.pinned[name] = self.pinned.get(name, 0) + 1
            return True

    def unpin(self, key: ChunkKey) -> None:
        with self.lock:
            name = file_name(key)
            count = self.pinned.get(name, 0) - 1
            if count > 0:
                self.pinned[name] = count
            else:
                self.pinned.pop(name, None)

    def stamp(self, keys: Iterable[ChunkKey]) -> None:
        """Note in their files that the chunks were used now, each at most once in TOUCH_SECONDS."""
        now = time.monotonic()
        with self.lock:
            if now - self._touched_since > TOUCH_SECONDS:
                self._touched.clear()
                self._touched_since = now
            fresh = [key for key in keys if key not in self._touched]
            self._touched.update(fresh)
        for key in fresh:
            with contextlib.suppress(OSError):
                os.utime(self.path(key), follow_symlinks=False)

    def stale(self) -> bool:
        """Whether the root has to be read again: it was cleaned up, or it was full and may have been emptied."""
        age = time.monotonic() - self._scanned_at
        if self._indexed_live != self.live or (
            self._refused and age > max(RESCAN_SECONDS, RESCAN_SHARE * self._scan_seconds)
        ):
            return True
        return age > 1 and self._changed_stamp() != self._changed_ns

    def promise(self, disk_bytes: int, model_name: str = "") -> bool:
        """Make room for a file of that size: True when it may be written.

        Once the watermark of what the live chunks may take is passed, whole sets leave, least
        recently used first. False when even that is not enough; then nothing left for it. Each
        promise ends with :meth:`keep` or :meth:`give_back`.
        """
        model_name = spelled(model_name)
        quota = self.quotas.get(model_name, self.quotas.get(base_model(model_name)))
        scopes = [("", None)] if quota is None else [(model_name, quota), ("", None)]
        for scope, bound in scopes:
            self._make_room(disk_bytes, scope, bound)
        with self.lock:
            for scope, bound in scopes:
                used, room = self._used_and_room(scope, bound)
                if used + disk_bytes > room:
                    self._refused = True
                    return False
            self.promised += disk_bytes
            return True

    def _used_and_room(self, scope: str, bound: Optional[int]) -> Tuple[int, int]:
        """Bytes that the live chunks (of one model name) take, and what they may take."""
        if bound is not None:
            return self.index.bytes_of(scope) + self.promised, bound
        live = self.index.total()
        return live + self.promised, self.limit() - (self.usage().total() - live)

    def _make_room(self, disk_bytes: int, scope: str, bound: Optional[int]) -> None:
        evicting = False
        while True:
            # A lookup waits for the lock, so it is taken anew for each batch; meanwhile other stores make
            # room too, so what is missing is counted anew as well.
            with self.lock:
                used, room = self._used_and_room(scope, bound)
                share = self.trigger_watermark - (self.eviction_ratio if evicting else 0)
                if disk_bytes > room or used + disk_bytes <= max(share * room, 0):
                    return
                target = max((self.trigger_watermark - self.eviction_ratio) * room, 0)
                if self._evict(used + disk_bytes - target, scope) == 0:
                    return
            evicting = True

    def keep(self, key: ChunkKey, promised_bytes: int, disk_bytes: int) -> None:
        """The promised file is there, under its name."""
        with self.lock:
            self.promised -= promised_bytes
            self.aside.pop(key, None)
            self.index.add(key, disk_bytes)
            self._note(key, disk_bytes)

    def give_back(self, promised_bytes: int) -> None:
        """The promised file was not written."""
        with self.lock:
            self.promised -= promised_bytes

    def forget(self, key: ChunkKey, to_quarantine: bool = False) -> int:
        """The chunk's file is gone from its name; its disk bytes."""
        with self.lock:
            size = self.index.discard(key)
            self._note(key, None)
            if to_quarantine:
                self.other.quarantine += size
            return size

    def set_aside(self, key: ChunkKey) -> int:
        """The chunk's file stays, but cannot be read now; its disk bytes, which go on counting."""
        with self.lock:
            size = self.forget(key)
            self.aside[key] = size
            return size

    def _note(self, key: ChunkKey, disk_bytes: Optional[int]) -> None:
        if self._journal is not None:
            self._journal.append((key, disk_bytes))

    def _evict(self, wanted: float, scope: str) -> int:
        """Remove up to EVICTION_BATCH of the oldest sets, until that many bytes are free; bytes freed."""
        chosen: List[Tuple[ChunkKey, int]] = []
        sets = chosen_bytes = freed = 0
        for members in self.index.oldest_sets(scope):
            if chosen_bytes >= wanted or sets >= EVICTION_BATCH:
                break
            if not any(file_name(key) in self.pinned or key in self._undeletable for key, _ in members):
                sets += 1
                chosen += members
                chosen_bytes += sum(size for _, size in members)
        for key, size in chosen:
            try:
                os.unlink(self.path(key))
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno == errno.EISDIR:  # it never goes; a disk that is read-only for a while does
                    self._undeletable.add(key)
                continue
            self.forget(key)
            freed += size
            self.evicted += 1
        return freed


def _canonical(head: Mapping[str, Any]) -> bytes:
    return json.dumps(head, sort_keys=True).encode()


def _disk_bytes(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0
