"""What lies in a cache root by namespace, what of it is damaged, and what an operator may remove from it.

Only regular files that stand in the root itself or in its quarantine, on its own file system,
and whose names are those of a chunk or of an unfinished write are ever removed. Everything
else is reported, and left alone. Safe beside a live server: it stores again what it misses.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import time
from typing import Any, Container, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from .objects import (
    HEADER_BYTES,
    Crc,
    FrameError,
    UnknownFrame,
    base_model,
    check,
    file_name,
    is_temp,
    read_header,
    split_hash,
    split_name,
)
from .store import CHANGED_FILE, QUARANTINE_DIR, walk

GB = 10**9

#: An unfinished write that was touched within this time (seconds) may still be going on.
TEMP_GRACE_SECONDS = 3600
#: What :func:`verify` reads at once.
READ_BYTES = 4 * 1024**2
#: A share of the budget that should not be wasted.
WASTE_SHARE = 0.5

CHUNK, TEMP, QUARANTINE, FOREIGN = "chunk", "temp", "quarantine", "foreign"

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class File(NamedTuple):
    """A file of the root. ``size`` is disk bytes, ``used`` the last use in seconds since 1970.

    ``kind`` is chunk, temp, quarantine or foreign; ``namespace`` the model name of a chunk.
    """

    name: str
    size: int
    used: float
    kind: str
    namespace: str


def _is_file(seen: os.stat_result, device: int) -> bool:
    return stat.S_ISREG(seen.st_mode) and seen.st_dev == device


def _kind(name: str) -> str:
    """What a regular file is by its path in the root."""
    folder, slash, base = name.rpartition("/")
    if slash:
        chunk, _, moved = base.rpartition(".")
        aside = folder == QUARANTINE_DIR and moved.isdecimal() and split_name(chunk) is not None
        return QUARANTINE if aside else FOREIGN
    return CHUNK if split_name(base) is not None else TEMP if is_temp(base) else FOREIGN


def _spread(top: int, name: str, seen: os.stat_result) -> Iterator[Tuple[str, os.stat_result]]:
    """The entry itself, or the files below a directory; links and other file systems are not entered."""
    if not stat.S_ISDIR(seen.st_mode):
        yield name, seen
        return
    with contextlib.suppress(OSError):  # gone, or not ours to read
        for folder, folders, names, here in os.fwalk(name, dir_fd=top, follow_symlinks=False):
            if os.fstat(here).st_dev != seen.st_dev:
                folders.clear()
                continue
            for base in names:
                with contextlib.suppress(OSError):
                    yield f"{folder}/{base}", os.stat(base, dir_fd=here, follow_symlinks=False)


def files(root: str) -> Iterator[File]:
    """What takes room in the root, on its own file system. Raises OSError when it cannot be read."""
    top = os.open(root, _DIRECTORY)
    try:
        device = os.fstat(top).st_dev
        for entry, status in walk(root):
            if status.st_dev != device:
                continue
            for name, seen in _spread(top, entry, status):
                kind = _kind(name) if stat.S_ISREG(seen.st_mode) else FOREIGN
                parts = split_name(name) if kind == CHUNK else None
                model = sys.intern(parts[0]) if parts is not None else ""
                yield File(name, seen.st_blocks * 512, seen.st_mtime, kind, model)
    finally:
        os.close(top)


def namespaces(root: str) -> Set[str]:
    """Model names that chunks of the root have, without what LMCache appends to them."""
    with os.scandir(root) as entries:
        return {base_model(parts[0]) for parts in (split_name(entry.name) for entry in entries) if parts is not None}


def as_text(name: str) -> str:
    """The name for JSON and other texts: bytes of it that are no UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def _namespace(model: str) -> str:
    """``kvp-...``, which a model name ends in."""
    return "".join(base_model(model).rpartition("kvp-")[1:])


def _manifest(top: int, model: str) -> Mapping[str, Any]:
    """What the gate wrote about a model name; one that cannot be read is as good as none."""
    try:
        # Neither a link nor a pipe that somebody left under that name.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(f"{_namespace(model)}.json", flags, dir_fd=top)
        with open(file, encoding="utf-8") as text:
            document = json.load(text)
        if document["model"] == base_model(model) and isinstance(document["identity"], dict):
            return dict(document["identity"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return {}


# -- report ----------------------------------------------------------------------------------


class _Row:
    """A namespace while it is counted: sets by hash and salt, their members as numbers of MEMBER bytes."""

    __slots__ = ("size", "objects", "oldest", "newest", "sets")
    MEMBER = 4

    def __init__(self) -> None:
        self.size = self.objects = 0
        self.oldest, self.newest = float("inf"), 0.0
        self.sets: Dict[bytes, bytes] = {}


def _complete(members: Iterable[Tuple[int, int]]) -> bool:
    """Whether all ranks of a set are there for each of its groups (the world size stands in kv_rank)."""
    groups: Dict[int, Set[int]] = {}
    for rank, group in members:
        groups.setdefault(group, set()).add(rank)
    return all(len(ranks) >= (next(iter(ranks)) >> 24 & 255) for ranks in groups.values())


def _count(root: str, top: int, classes: Dict[str, int]) -> Tuple[Dict[str, _Row], List[Tuple[int, int]]]:
    """Chunks by model name and the (rank, group) that each member's number means; other bytes go to ``classes``.

    Made for a million files: nothing is kept of a file but four bytes in its set.
    """
    device = os.fstat(top).st_dev
    rows: Dict[str, _Row] = {}
    numbers: Dict[Tuple[int, int], bytes] = {}
    # Most names differ from an earlier one in the hash alone; those need not be taken apart again.
    heads: Dict[str, Tuple[_Row, bytes, int]] = {}
    for name, seen in walk(root):
        head, _, tail = name.rpartition("_")
        known = heads.get(head)
        chunk = split_hash(tail) if known is not None and _is_file(seen, device) else None
        if known is not None and chunk is not None and len(chunk) == known[2]:
            row, number, _ = known
        else:
            parts = split_name(name) if _is_file(seen, device) else None
            if parts is None:
                for path, inner in _spread(top, name, seen) if seen.st_dev == device else ():
                    classes[_kind(path) if stat.S_ISREG(inner.st_mode) else FOREIGN] += inner.st_blocks * 512
                continue
            model, chunk, rank, group, salt = parts
            row = rows.get(model) or rows.setdefault(model, _Row())
            number = numbers.setdefault((rank, group), len(numbers).to_bytes(_Row.MEMBER, "little"))
            if not salt:
                heads[head] = (row, number, len(chunk))
            chunk += salt.encode("utf-8", "surrogateescape")
        row.size += seen.st_blocks * 512
        row.objects += 1
        used = seen.st_mtime
        if used < row.oldest:
            row.oldest = used
        if used > row.newest:
            row.newest = used
        row.sets[chunk] = row.sets.get(chunk, b"") + number
    return rows, list(numbers)


def report(
    root: str,
    live: Iterable[str],
    now: Optional[float] = None,
    budget: Optional[int] = None,
    reserve: int = 0,
    served: Optional[Mapping[str, int]] = None,
) -> Dict[str, Any]:
    """By namespace: disk bytes, objects, complete and incomplete sets, tokens, age in seconds, live or dead.

    Tokens are those of complete sets, None without a manifest that says how long a chunk is.
    ``budget`` and ``reserve`` are bytes; without a budget nothing is warned of. ``served`` are
    the tokens that the running server took from the cache, by model name; None when it does not
    answer. A chunk is kept once, however many requests share it: ``saved_bytes`` are what the
    served tokens would take on this disk had each request kept a copy of its own.
    Raises OSError when the root cannot be read.
    """
    now = time.time() if now is None else now
    lives = frozenset(live)
    classes = {"live": 0, "dead": 0, FOREIGN: 0, TEMP: 0, QUARANTINE: 0}
    shown: Dict[str, Dict[str, Any]] = {}
    top = os.open(root, _DIRECTORY)
    try:
        rows, members = _count(root, top, classes)
        for name, row in rows.items():
            is_live = base_model(name) in lives
            classes["live" if is_live else "dead"] += row.size
            complete, in_complete = _complete_sets(row, members)
            chunk = _manifest(top, name).get("chunk_size")
            tokens = complete * chunk if isinstance(chunk, int) else None
            hits = served.get(name, 0) if served is not None and is_live else None
            shown[as_text(name)] = {
                "live": is_live,
                "bytes": row.size,
                "objects": row.objects,
                "complete_sets": complete,
                "incomplete_sets": len(row.sets) - complete,
                "tokens": tokens,
                "oldest_seconds": max(0, int(now - row.oldest)),
                "newest_seconds": max(0, int(now - row.newest)),
                "served_tokens": hits,
                "saved_bytes": int(hits * row.size * in_complete / row.objects / tokens)
                if hits is not None and tokens
                else None,
            }
    finally:
        os.close(top)
    disk = os.statvfs(root)
    free = disk.f_bavail * disk.f_frsize
    return {
        "root": root,
        "namespaces": shown,
        "bytes": classes,
        "budget_bytes": budget,
        "disk_free_bytes": free,
        "disk_bytes": disk.f_blocks * disk.f_frsize,
        "warnings": [] if budget is None else _warnings(root, classes, budget, free, reserve, bool(lives)),
    }


def _complete_sets(row: _Row, members: List[Tuple[int, int]]) -> Tuple[int, int]:
    """Complete sets of a namespace, and the objects that they have."""
    verdicts: Dict[bytes, bool] = {}
    sets = objects = 0
    for packed in row.sets.values():
        verdict = verdicts.get(packed)
        if verdict is None:
            numbers = (packed[at : at + _Row.MEMBER] for at in range(0, len(packed), _Row.MEMBER))
            verdict = _complete(members[int.from_bytes(number, "little")] for number in numbers)
            verdicts[packed] = verdict
        if verdict:
            sets += 1
            objects += len(packed) // _Row.MEMBER
    return sets, objects


def _warnings(root: str, classes: Mapping[str, int], budget: int, free: int, reserve: int, has_live: bool) -> List[str]:
    """What wastes the budget or ends it, with the command that helps."""

    def gigabytes(size: int) -> str:
        return f"{size / GB:.3f} GB"

    found = []
    share = f"more than half of the budget of {gigabytes(budget)}"
    # A host that is served uncached for now has no live namespace: then nothing says that the rest is waste.
    if has_live and classes["dead"] > budget * WASTE_SHARE:
        found.append(f"dead namespaces take {gigabytes(classes['dead'])}, {share}: kvp-admin cleanup --dead")
    if classes[FOREIGN] > budget * WASTE_SHARE:
        found.append(
            f"files that are no chunks take {gigabytes(classes[FOREIGN])}, {share}: move them out of {root}, "
            "kvp-admin never removes them"
        )
    used = sum(classes.values())
    first = "kvp-admin cleanup --dead" if has_live and classes["dead"] else "kvp-admin cleanup --to-budget"
    if used > budget:
        found.append(f"the root takes {gigabytes(used)}, more than its budget of {gigabytes(budget)}: {first}")
    if free <= reserve:
        found.append(
            f"the disk has {gigabytes(free)} free, the reserve is {gigabytes(reserve)}, and the cache shrinks: "
            f"make room on the disk, or {first}"
        )
    return found


def prometheus(shown: Mapping[str, Any]) -> str:
    """A :func:`report` in Prometheus' text format; what is unknown is left out."""
    samples: Dict[str, List[Tuple[Dict[str, str], Any]]] = {}
    for model, row in shown["namespaces"].items():
        labels = {"namespace": _namespace(model), "model": model, "class": "live" if row["live"] else "dead"}
        for key, value in row.items():
            if key != "live" and value is not None:
                samples.setdefault(f"namespace_{key}", []).append((labels, value))
    samples["bytes"] = [({"class": name}, size) for name, size in shown["bytes"].items()]
    for key in ("budget_bytes", "disk_free_bytes", "disk_bytes"):
        if shown[key] is not None:
            samples[key] = [({}, shown[key])]
    samples["warnings"] = [({}, len(shown["warnings"]))]
    lines = []
    for key, values in samples.items():
        lines += [f"# HELP kvp_report_{key} {_HELP[key]}", f"# TYPE kvp_report_{key} gauge"]
        for labels, value in values:
            text = ",".join(f'{name}="{_label(label)}"' for name, label in labels.items())
            lines.append(f"kvp_report_{key}{'{' + text + '}' if text else ''} {value}")
    return "".join(line + "\n" for line in lines)


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


_HELP = {
    "namespace_bytes": "Disk bytes of the chunks.",
    "namespace_objects": "Chunk files.",
    "namespace_complete_sets": "Chunks of which every rank and group is there.",
    "namespace_incomplete_sets": "Chunks of which a rank is missing.",
    "namespace_tokens": "Tokens of the complete sets.",
    "namespace_oldest_seconds": "Time since the least recent use.",
    "namespace_newest_seconds": "Time since the most recent use.",
    "namespace_served_tokens": "Tokens served from the cache since the server started.",
    "namespace_saved_bytes": "What the served tokens would take had each request kept its own copy.",
    "bytes": "Disk bytes of the cache root.",
    "budget_bytes": "Disk budget of the cache root.",
    "disk_free_bytes": "Free bytes of the file system.",
    "disk_bytes": "Bytes of the file system.",
    "warnings": "Warnings that kvp-admin report shows.",
}


# -- verify ----------------------------------------------------------------------------------

OK, DAMAGED, OTHER_RELEASE, RAW, UNREADABLE, GONE = "ok", "damaged", "other_release", "raw", "unreadable", "gone"
VERDICTS = (OK, DAMAGED, OTHER_RELEASE, RAW, UNREADABLE, GONE)


class Checked(NamedTuple):
    """What :func:`verify` makes of a file: one of VERDICTS and why. ``size`` is the bytes that it has."""

    name: str
    verdict: str
    why: str
    size: int


def verify(
    root: str, crc32c: Crc, wanted: Optional[Container[str]] = None, bytes_per_second: Optional[float] = None
) -> Iterator[Checked]:
    """Read every frame, or those of the model names in ``wanted``, and check key, length and CRC.

    Files of the stock adapter have no frame (their manifest says so) and are not read. Memory is
    bounded, and what was read leaves the page cache again. A chunk that a live server removes
    meanwhile is gone, not damaged. Raises OSError when the root itself cannot be read.
    """
    raw: Dict[str, bool] = {}
    pace, buffer = _Pace(bytes_per_second), memoryview(bytearray(READ_BYTES))
    top = os.open(root, _DIRECTORY)
    try:
        device = os.fstat(top).st_dev
        for name, seen in walk(root):
            parts = split_name(name) if _is_file(seen, device) else None
            model = base_model(parts[0]) if parts is not None else ""
            if parts is None or (wanted is not None and model not in wanted):
                continue
            if model not in raw:
                raw[model] = _manifest(top, model).get("store_format") == "raw"
            if raw[model]:
                yield Checked(name, RAW, "", seen.st_size)
                continue
            verdict, why = _verify_file(top, device, name, crc32c, buffer, pace)
            yield Checked(name, verdict, why, seen.st_size)
    finally:
        os.close(top)


def _verify_file(top: int, device: int, name: str, crc32c: Crc, buffer: memoryview, pace: _Pace) -> Tuple[str, str]:
    """Verdict on one file, and why."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=top)
        try:
            seen = os.fstat(file)
            if not _is_file(seen, device):
                return GONE, "it is no regular file of this file system any more"
            page = b"".join(_pieces(file, 0, HEADER_BYTES, buffer, pace))
            frame = read_header(memoryview(page))
            if file_name(frame.key) != name:
                raise FrameError(f"the file holds {file_name(frame.key)}")

            def streamed(data: memoryview, start: int) -> int:
                # check() asks for the header's CRC and goes on with the stored bytes, which are read only now.
                if len(data) > 0:
                    return crc32c(data, start)
                for piece in _pieces(file, HEADER_BYTES, frame.stored_length, buffer, pace):
                    start = crc32c(piece, start)
                return start

            check(frame, seen.st_size, memoryview(page), memoryview(b""), streamed)
        finally:
            os.close(file)
    except UnknownFrame as error:
        return OTHER_RELEASE, str(error)
    except FrameError as error:
        return DAMAGED, str(error)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return GONE, "another file is there now" if error.errno == errno.ELOOP else ""
        return UNREADABLE, error.strerror or str(error)
    return OK, ""


def _pieces(file: int, start: int, length: int, buffer: memoryview, pace: _Pace) -> Iterator[memoryview]:
    """Bytes of the file up to its end, piece by piece in the same buffer."""
    at, end = start, start + length
    while at < end:
        wanted = min(end - at, len(buffer))
        pace.wait(wanted)
        got = os.preadv(file, [buffer[:wanted]], at)
        if got == 0:
            return
        # Nobody else reads it soon: the page cache is for what is in use.
        os.posix_fadvise(file, at, got, os.POSIX_FADV_DONTNEED)
        yield buffer[:got]
        at += got


class _Pace:
    """Reads at most so many bytes in a second; None for as fast as it goes."""

    def __init__(self, bytes_per_second: Optional[float]) -> None:
        self.rate = bytes_per_second
        self.due = 0.0

    def wait(self, wanted: int) -> None:
        """Sleep until so many bytes may be read."""
        if self.rate is not None:
            now = time.monotonic()
            if now < self.due:
                time.sleep(self.due - now)
            self.due = max(self.due, now) + wanted / self.rate


# -- cleanup ---------------------------------------------------------------------------------


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
    ``to_budget``: then as many chunks as bring the root down to so many disk bytes, dead ones
    first. Raises OSError when the root cannot be read.
    """
    now = time.time() if now is None else now
    lives = frozenset(live)
    chosen: List[File] = []
    others: List[File] = []
    left = 0
    for file in files(root):
        model = base_model(file.namespace)
        if file.kind == CHUNK:
            named = dead or namespace != ""
            selected = (dead and model not in lives) or (namespace != "" and model == namespace)
            if older_than_seconds is not None:
                selected = (selected or not named) and now - file.used >= older_than_seconds
        elif file.kind == TEMP:
            selected = temp and now - file.used >= TEMP_GRACE_SECONDS
        else:
            selected = corrupt and file.kind == QUARANTINE
        if selected:
            chosen.append(file)
        elif to_budget is not None:
            left += file.size
            if file.kind == CHUNK:
                others.append(file)
    chosen.sort(key=lambda file: (file.used, file.name))
    if to_budget is not None:
        others.sort(key=lambda file: (base_model(file.namespace) in lives, file.used, file.name))
        for file in others:
            if left <= to_budget:
                break
            chosen.append(file)
            left -= file.size
    return chosen


def remove(root: str, chosen: Iterable[File]) -> Tuple[List[File], List[Tuple[File, str]]]:
    """Unlink the files; (removed, not removed and why). What is gone or was used meanwhile is neither.

    Whatever the list says, only what may be removed is: names are judged and looked up again in
    the open root, and never followed through a link. A running server is told. Raises OSError
    when the root cannot be opened.
    """
    removed: List[File] = []
    kept: List[Tuple[File, str]] = []
    top = os.open(root, _DIRECTORY)
    try:
        device = os.fstat(top).st_dev
        with contextlib.ExitStack() as stack:
            folders = {"": top}
            for file in chosen:
                folder, _, base = file.name.rpartition("/")
                if _kind(file.name) == FOREIGN:
                    kept.append((file, "its name is not one that may be removed"))
                    continue
                try:
                    if folder not in folders:
                        folders[folder] = stack.enter_context(_below(top, folder))
                    seen = os.stat(base, dir_fd=folders[folder], follow_symlinks=False)
                    if not _is_file(seen, device):
                        kept.append((file, "it is no regular file of this file system any more"))
                    elif seen.st_mtime == file.used:
                        os.unlink(base, dir_fd=folders[folder])
                        removed.append(file)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    kept.append((file, error.strerror or str(error)))
    finally:
        if removed:
            _tell_server(top)
        os.close(top)
    return removed, kept


@contextlib.contextmanager
def _below(top: int, path: str) -> Iterator[int]:
    """Descriptor of a directory below the open one. Raises OSError for a link on the way."""
    with contextlib.ExitStack() as stack:
        here = top
        for part in path.split("/"):
            here = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            stack.callback(os.close, here)
        yield here


def _tell_server(top: int) -> None:
    """Stamp CHANGED_FILE, so that a running server counts again. It is a hint: without it the room is found later."""
    folder, _, base = CHANGED_FILE.rpartition("/")
    with contextlib.suppress(OSError), _below(top, folder) as product:
        try:
            file = os.open(base, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=product)
        except FileExistsError:
            os.utime(base, dir_fd=product, follow_symlinks=False)
            return
        try:
            owner = os.fstat(top)
            os.fchown(file, owner.st_uid, owner.st_gid)
        finally:
            os.close(file)
