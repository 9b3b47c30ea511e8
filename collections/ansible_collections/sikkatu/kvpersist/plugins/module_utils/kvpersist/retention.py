"""What lies in a cache root by namespace, and what an operator may remove from it.

Only regular files that stand in the root itself, on its own file system, and whose names are
those of a chunk or of an unfinished write are ever removed. Everything else is reported, and
left alone. Safe beside a live server: it stores again what it misses.
"""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple

from .objects import ChunkKey, is_temp, parse_name
from .store import QUARANTINE_DIR

#: An unfinished write that was touched within this time (seconds) may still be going on.
TEMP_GRACE_SECONDS = 3600


@dataclass(frozen=True)
class File:
    """One file of the root. ``size`` is disk bytes, ``used`` the last use in seconds since 1970."""

    name: str
    size: int
    used: float
    key: Optional[ChunkKey]
    temp: bool

    @property
    def namespace(self) -> str:
        return self.key.model_name if self.key is not None else ""


def files(root: str) -> Iterator[File]:
    """Every regular file of the root and of its quarantine; links and directories are not followed."""
    device = os.stat(root).st_dev
    for prefix in ("", f"{QUARANTINE_DIR}/"):
        try:
            entries = list(os.scandir(os.path.join(root, prefix)))
        except FileNotFoundError:
            continue
        for entry in entries:
            try:
                seen = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISREG(seen.st_mode) and seen.st_dev == device:
                key = None if prefix else parse_name(entry.name)
                yield File(prefix + entry.name, seen.st_blocks * 512, seen.st_mtime, key, is_temp(entry.name))


def manifests(root: str) -> Dict[str, Dict[str, Any]]:
    """Manifests of the gate by model name; one that cannot be read is as good as none."""
    found = {}
    for entry in os.scandir(root):
        if entry.name.startswith("kvp-") and entry.name.endswith(".json") and entry.is_file(follow_symlinks=False):
            try:
                with open(entry.path, encoding="utf-8") as file:
                    document = json.load(file)
                found[str(document["model"])] = document
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
    return found


def _complete(members: Set[Tuple[int, int]]) -> bool:
    """Whether all ranks of a set are there for each of its groups (the world size stands in kv_rank)."""
    groups: Dict[int, Set[int]] = {}
    for rank, group in members:
        groups.setdefault(group, set()).add(rank)
    return all(len(ranks) >= (next(iter(ranks)) >> 24 & 255) for ranks in groups.values())


def report(root: str, live: Iterable[str], now: Optional[float] = None) -> Dict[str, Any]:
    """By namespace: disk bytes, objects, complete and incomplete sets, tokens, age in seconds, live or dead.

    Tokens are those of complete sets, None without a manifest that says how long a chunk is.
    """
    now = time.time() if now is None else now
    lives, known = frozenset(live), manifests(root)
    namespaces: Dict[str, Dict[str, Any]] = {}
    sets: Dict[str, Dict[Tuple[bytes, str], Set[Tuple[int, int]]]] = {}
    classes = {"live": 0, "dead": 0, "foreign": 0, "temp": 0, "quarantine": 0}
    for file in files(root):
        if file.key is None:
            kind = "quarantine" if "/" in file.name else "temp" if file.temp else "foreign"
            classes[kind] += file.size
            continue
        name = file.namespace
        classes["live" if name in lives else "dead"] += file.size
        row = namespaces.setdefault(
            name, {"live": name in lives, "bytes": 0, "objects": 0, "oldest_use": file.used, "newest_use": file.used}
        )
        row["bytes"] += file.size
        row["objects"] += 1
        row["oldest_use"] = min(row["oldest_use"], file.used)
        row["newest_use"] = max(row["newest_use"], file.used)
        members = sets.setdefault(name, {}).setdefault((file.key.chunk_hash, file.key.salt), set())
        members.add((file.key.kv_rank, file.key.object_group))
    for name, row in namespaces.items():
        complete = sum(_complete(members) for members in sets[name].values())
        chunk = known.get(name, {}).get("identity", {}).get("chunk_size")
        row.update(
            complete_sets=complete,
            incomplete_sets=len(sets[name]) - complete,
            tokens=complete * chunk if isinstance(chunk, int) else None,
            oldest_seconds=max(0, int(now - row.pop("oldest_use"))),
            newest_seconds=max(0, int(now - row.pop("newest_use"))),
        )
    shown = os.statvfs(root)
    return {
        "root": root,
        "namespaces": namespaces,
        "bytes": classes,
        "disk_free_bytes": shown.f_bavail * shown.f_frsize,
        "disk_bytes": shown.f_blocks * shown.f_frsize,
    }


def removable(
    root: str,
    live: Iterable[str],
    dead: bool = False,
    namespace: str = "",
    older_than_seconds: Optional[float] = None,
    temp: bool = False,
    corrupt: bool = False,
    to_budget: Optional[int] = None,
    now: Optional[float] = None,
) -> List[File]:
    """Files that the selections name, least recently used first.

    ``dead``: chunks of namespaces that are not live. ``namespace``: those of one, live or dead.
    ``older_than_seconds``: chunks not used for so long, of the selected namespaces or of all.
    ``temp``: unfinished writes that nothing touched for an hour. ``corrupt``: the quarantine.
    ``to_budget``: as many chunks as bring the root down to so many disk bytes, dead ones first.
    """
    now = time.time() if now is None else now
    lives = frozenset(live)
    seen = sorted(files(root), key=lambda file: (file.used, file.name))
    chosen: Dict[str, File] = {}

    def old(file: File) -> bool:
        return older_than_seconds is None or now - file.used >= older_than_seconds

    for file in seen:
        is_dead = file.key is not None and file.namespace not in lives
        by_name = (dead and is_dead) or (namespace != "" and file.namespace == namespace)
        by_age = older_than_seconds is not None and not dead and not namespace and file.key is not None
        if (
            (old(file) and (by_name or by_age))
            or (temp and file.temp and "/" not in file.name and now - file.used >= TEMP_GRACE_SECONDS)
            or (corrupt and "/" in file.name)
        ):
            chosen[file.name] = file
    if to_budget is not None:
        left = sum(file.size for file in seen) - sum(file.size for file in chosen.values())
        for file in sorted(
            (f for f in seen if f.key is not None), key=lambda f: (f.namespace in lives, f.used, f.name)
        ):
            if left <= to_budget:
                break
            if file.name not in chosen:
                chosen[file.name] = file
                left -= file.size
    return list(chosen.values())


def remove(root: str, chosen: Iterable[File]) -> Tuple[List[File], List[Tuple[File, str]]]:
    """Unlink the files; (removed, not removed and why).

    A name is looked up in the open root, and never followed through a link.
    """
    removed: List[File] = []
    kept: List[Tuple[File, str]] = []
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        device = os.fstat(top).st_dev
        for file in chosen:
            if file.key is None and not file.temp and not file.name.startswith(f"{QUARANTINE_DIR}/"):
                kept.append((file, "its name is not one that may be removed"))
                continue
            try:
                seen = os.stat(file.name, dir_fd=top, follow_symlinks=False)
                if not stat.S_ISREG(seen.st_mode) or seen.st_dev != device:
                    kept.append((file, "it is no regular file of this file system any more"))
                    continue
                os.unlink(file.name, dir_fd=top)
                removed.append(file)
            except FileNotFoundError:
                continue
            except OSError as error:
                kept.append((file, error.strerror or str(error)))
    finally:
        os.close(top)
    return removed, kept
