"""A cache root: what lies in it, what it takes on the disk, and what leaves first.

Sizes are disk bytes (allocated blocks). Only chunks of the live namespaces are ever evicted;
everything else in the root is counted, and left to ``kvp-admin cleanup``. Opening a store
deletes nothing, however full it is.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Tuple

from .objects import ChunkKey, file_name, is_temp, parse_name

#: Product files live below the root in here; quarantine is a directory of it.
PRODUCT_DIR = ".kvpersist"
QUARANTINE_DIR = f"{PRODUCT_DIR}/quarantine"

#: Files of the product beside the chunks: counted as foreign, never touched.
ALL_NAMESPACES = "*"

_MEMBER = struct.Struct("<IHQ")  # kv_rank, object group, disk bytes


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
        self._sets: Dict[bytes, bytes] = {}
        self._models: Dict[str, int] = {}
        self._names: List[str] = []
        self.count = 0
        self.bytes = 0

    def _set(self, key: ChunkKey) -> bytes:
        number = self._models.get(key.model_name)
        if number is None:
            number = self._models[key.model_name] = len(self._names)
            self._names.append(key.model_name)
        return b"%c%c%c" % (number >> 8, number & 255, len(key.chunk_hash)) + key.chunk_hash + key.salt.encode()

    def get(self, key: ChunkKey) -> Optional[int]:
        """Disk bytes of the chunk's file, None when it is not here."""
        members = self._sets.get(self._set(key))
        if members is not None:
            for rank, group, size in _MEMBER.iter_unpack(members):
                if (rank, group) == (key.kv_rank, key.object_group):
                    return int(size)
        return None

    def add(self, key: ChunkKey, disk_bytes: int) -> None:
        """Add a chunk, or give it another size; its set becomes the newest."""
        self.discard(key)
        name = self._set(key)
        members = self._sets.pop(name, b"")
        self._sets[name] = members + _MEMBER.pack(key.kv_rank, key.object_group, disk_bytes)
        self.count += 1
        self.bytes += disk_bytes

    def discard(self, key: ChunkKey) -> int:
        """Forget a chunk; its disk bytes, 0 when it was not here."""
        name = self._set(key)
        members = self._sets.get(name)
        for at in range(0, len(members or b""), _MEMBER.size):
            rank, group, size = _MEMBER.unpack_from(members or b"", at)
            if (rank, group) == (key.kv_rank, key.object_group):
                left = (members or b"")[:at] + (members or b"")[at + _MEMBER.size :]
                if left:
                    self._sets[name] = left
                else:
                    del self._sets[name]
                self.count -= 1
                self.bytes -= size
                return int(size)
        return 0

    def touch(self, key: ChunkKey) -> None:
        """Make the chunk's set the newest."""
        name = self._set(key)
        members = self._sets.pop(name, None)
        if members is not None:
            self._sets[name] = members

    def oldest_sets(self) -> Iterator[List[Tuple[ChunkKey, int]]]:
        """Whole sets with their disk bytes, oldest first; the index may change meanwhile."""
        for name in list(self._sets):
            members = self._sets.get(name)
            if members is None:
                continue
            model, end = self._names[(name[0] << 8) | name[1]], 3 + name[2]
            chunk_hash, salt = name[3:end], name[end:].decode()
            yield [
                (ChunkKey(model, chunk_hash, rank, group, salt), int(size))
                for rank, group, size in _MEMBER.iter_unpack(members)
            ]


class Store:
    """The files of one cache root, for one server.

    ``budget_bytes`` bounds everything in the root, ``reserve_bytes`` of the file system stay
    free. ``trigger_watermark`` and ``eviction_ratio`` are shares of that limit.
    """

    def __init__(
        self,
        root: str,
        live: Iterable[str],
        budget_bytes: int,
        reserve_bytes: int = 0,
        trigger_watermark: float = 0.9,
        eviction_ratio: float = 0.1,
        free_bytes: Optional[Callable[[], int]] = None,
    ) -> None:
        self.root = root
        self.live = frozenset(live)
        self.budget_bytes = budget_bytes
        self.reserve_bytes = reserve_bytes
        self.trigger_watermark = trigger_watermark
        self.eviction_ratio = eviction_ratio
        self.lock = threading.RLock()
        self.index = Index()
        self.other = Usage()
        self.pinned: Dict[ChunkKey, int] = {}
        self.promised = 0
        self.evicted = 0
        self._free_bytes = free_bytes or self._free_on_disk

    # -- what is there -------------------------------------------------------------------

    def is_live(self, model_name: str) -> bool:
        return ALL_NAMESPACES in self.live or model_name in self.live

    def path(self, key: ChunkKey) -> str:
        return os.path.join(self.root, file_name(key))

    def scan(self) -> None:
        """Read the root: the live chunks in age order, everything else as bytes. Deletes nothing."""
        found: List[Tuple[float, ChunkKey, int]] = []
        other = Usage()
        for entry in os.scandir(self.root):
            if entry.is_dir(follow_symlinks=False):
                quarantine = entry.name == PRODUCT_DIR
                for directory, _, names in os.walk(entry.path):
                    size = sum(_disk_bytes(os.path.join(directory, name)) for name in names)
                    if quarantine and directory.endswith(QUARANTINE_DIR):
                        other.quarantine += size
                    else:
                        other.foreign += size
                continue
            try:
                seen = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            size = seen.st_blocks * 512
            key = parse_name(entry.name) if entry.is_file(follow_symlinks=False) else None
            if key is not None and self.is_live(key.model_name):
                found.append((seen.st_mtime, key, size))
            elif key is not None:
                other.dead += size
            elif is_temp(entry.name):
                other.temp += size
            else:
                other.foreign += size
        found.sort(key=lambda each: each[0])
        with self.lock:
            self.index, self.other = Index(), other
            for _, key, size in found:
                self.index.add(key, size)

    def usage(self) -> Usage:
        with self.lock:
            seen = self.other
            return Usage(self.index.bytes, seen.dead, seen.foreign, seen.temp, seen.quarantine)

    def limit(self) -> int:
        """Bytes that the root may take now: the budget, or what the disk has above the reserve."""
        with self.lock:
            here = self.usage().total()
        return min(self.budget_bytes, here + self._free_bytes() - self.reserve_bytes)

    def _free_on_disk(self) -> int:
        shown = os.statvfs(self.root)
        return shown.f_bavail * shown.f_frsize

    # -- use -----------------------------------------------------------------------------

    def has(self, key: ChunkKey) -> bool:
        with self.lock:
            return self.index.get(key) is not None

    def pin(self, key: ChunkKey) -> bool:
        """Keep a chunk from eviction until :meth:`unpin`; it was used just now. False when it is not here."""
        with self.lock:
            if self.index.get(key) is None:
                return False
            self.index.touch(key)
            self.pinned[key] = self.pinned.get(key, 0) + 1
            return True

    def unpin(self, key: ChunkKey) -> None:
        with self.lock:
            count = self.pinned.get(key, 0) - 1
            if count > 0:
                self.pinned[key] = count
            else:
                self.pinned.pop(key, None)

    def promise(self, disk_bytes: int) -> bool:
        """Make room for a file of that size: True when it may be written.

        Evicts whole sets, least recently used first, once the watermark is passed; False when
        even that is not enough. Each promise ends with :meth:`keep` or :meth:`give_back`.
        """
        with self.lock:
            limit = self.limit()
            wanted = self.usage().total() + self.promised + disk_bytes
            if wanted > self.trigger_watermark * limit:
                target = (self.trigger_watermark - self.eviction_ratio) * limit
                wanted -= self._evict(wanted - max(target, 0))
            if wanted > limit:
                return False
            self.promised += disk_bytes
            return True

    def keep(self, key: ChunkKey, promised_bytes: int, disk_bytes: int) -> None:
        """The promised file is there, under its name."""
        with self.lock:
            self.promised -= promised_bytes
            self.index.add(key, disk_bytes)

    def give_back(self, promised_bytes: int) -> None:
        """The promised file was not written."""
        with self.lock:
            self.promised -= promised_bytes

    def forget(self, key: ChunkKey, to_quarantine: bool = False) -> None:
        """The chunk's file is gone from its name."""
        with self.lock:
            size = self.index.discard(key)
            if to_quarantine:
                self.other.quarantine += size

    def _evict(self, wanted: float) -> int:
        freed = 0
        for members in self.index.oldest_sets():
            if freed >= wanted:
                break
            if any(key in self.pinned for key, _ in members):
                continue
            for key, size in members:
                try:
                    os.unlink(self.path(key))
                except FileNotFoundError:
                    pass
                except OSError:
                    continue  # not freed; the next set may be
                self.index.discard(key)
                freed += size
                self.evicted += 1
        return freed


def _disk_bytes(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0
