"""A root of many files, and what reading it takes in a process of its own: index_bench.py make|open|save|report

make ROOT COUNT   a root with that many files, named as the store names them; they hold nothing
open ROOT         Store.open(): by the saved index where there is one, else by reading the root
save ROOT         read the root and save the index
report ROOT       what kvp-admin report does, for its memory
"""

import hashlib
import json
import os
import sys
import time

from kvpersist import retention
from kvpersist.objects import ChunkKey, file_name
from kvpersist.store import QUARANTINE_DIR, Store

MODEL = "bench-kvp-bench"


def make(root, count):
    os.makedirs(os.path.join(root, QUARANTINE_DIR))
    top = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(int(count)):
        # One rank: each file is a set of its own, which takes the most memory.
        key = ChunkKey(MODEL, hashlib.sha256(number.to_bytes(8, "big")).digest(), 0x01000100)
        file = os.open(file_name(key), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=top)
        os.close(file)
    return {}


def store(root):
    return Store(root, [MODEL], 10**15)


def opened(root):
    opening, before, started = store(root), memory("VmRSS"), time.monotonic()
    saved = opening.open()
    seconds = time.monotonic() - started
    growth = memory("VmHWM") - before
    return {"seconds": seconds, "saved": saved, "count": opening.index.count, "growth_bytes": growth}


def save(root):
    saving = store(root)
    saving.scan()
    saving.save()
    return {}


def report(root):
    before = memory("VmRSS")
    shown = retention.report(root, [MODEL])
    return {"count": shown["namespaces"][MODEL]["objects"], "growth_bytes": memory("VmHWM") - before}


def memory(name):
    """Bytes that the process has now (VmRSS) or had at most (VmHWM)."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


if __name__ == "__main__":
    action = {"make": make, "open": opened, "save": save, "report": report}[sys.argv[1]]
    print(json.dumps(action(*sys.argv[2:])))
