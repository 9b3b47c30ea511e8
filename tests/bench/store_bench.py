"""One L2 adapter of LMCache under the clock: store_bench.py ADAPTER OBJECT_MIB COUNT

Runs inside the serving image, where /bench is on the disk to measure. It opens the adapter as the server
does, with the JSON that the role renders and with LMCache's own L1 memory, and then does what standard
input says, one JSON object a line: {"do": "store" | "load" | "clear"}. The answers go to file descriptor 3:
seconds, and CPU seconds (user and system) of this process.
"""

import argparse
import ctypes
import json
import os
import pathlib
import resource
import select
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from crc32c import crc32c
from kvpersist import objects, render
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from lmcache.v1.platform import consume_fd

ROOT = pathlib.Path("/bench")
MODEL = "bench-kvp-bench"
HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25
#: Threads that make stock's files durable, as many as the store has.
SYNC_THREADS = 4

check = objects.check


def length_only(frame, file_bytes, page, stored, crc32c):
    """The check of a frame without its checksum; everything else stays as it is."""
    if file_bytes != frame.file_bytes:
        raise objects.FrameError("wrong length")


class Bench:
    def __init__(self, name, object_mib, count):
        # An open gate, since the JSON of the role asks for one.
        gate = pathlib.Path(render.GATE_FILE)
        gate.parent.mkdir(parents=True)
        gate.write_text(json.dumps({"gate": "open", "model": MODEL}))
        os.environ["KVP_MODEL"] = MODEL
        # [2, layers, tokens, hidden] in bf16: 32 layers and 256 tokens.
        shape = torch.Size((2, 32, 256, object_mib * 32))
        self.bytes = object_mib * 2**20 * count
        self.durable = name == "kvpersist"
        self.memory = L1MemoryManager(L1MemoryManagerConfig(self.bytes, False, shm_name=""))
        error, self.objects = self.memory.allocate(MemoryLayoutDesc([shape], [torch.bfloat16]), count)
        assert len(self.objects) == count, error
        for obj in self.objects:
            obj.raw_data.view(torch.int64).random_()
        self.huge = self.on_huge_pages(self.memory.get_l1_memory_desc())
        self.sums = [self.sum(obj) for obj in self.objects]
        budget_gb = max(self.bytes * 4 / render.GB, 1)
        arguments = argparse.Namespace(l2_adapter=[render.l2_adapter(str(ROOT), budget_gb, adapter=name)])
        config = parse_args_to_l2_adapters_config(arguments).adapters[0]
        self.adapter = create_l2_adapter_from_registry(config, self.memory.get_l1_memory_desc())
        self.pool = ThreadPoolExecutor(SYNC_THREADS)
        self.number = 0
        self.keys = []

    @staticmethod
    def on_huge_pages(arena):
        """Whether the L1 memory is on huge pages now.

        A direct read into scattered small pages is cut into many requests. How scattered they are is
        chance, and made the same read up to two times slower from one process to the next.
        """
        start = -(-arena.ptr // HUGE_PAGE) * HUGE_PAGE
        length = (arena.ptr + arena.size - start) // HUGE_PAGE * HUGE_PAGE
        return ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_COLLAPSE) == 0

    @staticmethod
    def sum(obj):
        return crc32c(memoryview(obj.raw_data.numpy()))

    def clocked(self, work):
        """Seconds and CPU seconds of ``work``, which ends when the adapter has answered."""
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        work()
        seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        return {"seconds": seconds, "cpu": cpu, "bytes": self.bytes}

    @staticmethod
    def finished(event, query, *arguments):
        """As LMCache's controllers wait: on the file descriptor, not in a loop."""
        while True:
            result = query(*arguments)
            if result:
                return result
            poll = select.poll()
            poll.register(event, select.POLLIN)
            if not poll.poll(120_000):
                raise SystemExit("the adapter did not answer within 120 s")
            consume_fd(event)

    def store(self):
        self.number += 1
        self.keys = [
            ObjectKey((self.number << 32 | n).to_bytes(32, "big"), MODEL, 0x01000100, 0, "")
            for n in range(len(self.objects))
        ]

        def work():
            task = self.adapter.submit_store_task(self.keys, self.objects)
            done = self.finished(self.adapter.get_store_event_fd(), self.adapter.pop_completed_store_tasks)
            assert done[task].is_successful(), done
            if not self.durable:
                list(self.pool.map(self.sync, ROOT.glob("*.bin")))

        return self.clocked(work)

    @staticmethod
    def sync(path):
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.close(file)

    def load(self, crc=True):
        for obj in self.objects:
            obj.raw_data.zero_()
        objects.check = check if crc else length_only

        def work():
            adapter = self.adapter
            task = adapter.submit_lookup_and_lock_task(self.keys, {})
            event = adapter.get_lookup_and_lock_event_fd()
            found = self.finished(event, adapter.query_lookup_and_lock_result, task)
            assert found.popcount() == len(self.keys), "not all were found"
            task = adapter.submit_load_task(self.keys, self.objects)
            loaded = self.finished(adapter.get_load_event_fd(), adapter.query_load_result, task)
            assert loaded.popcount() == len(self.keys), "not all were loaded"

        seen = self.clocked(work)
        self.adapter.submit_unlock(self.keys)
        assert [self.sum(obj) for obj in self.objects] == self.sums, "wrong bytes"
        return seen

    def clear(self):
        self.adapter.delete(self.keys)
        assert not list(ROOT.glob("*.bin"))
        return {}

    def close(self):
        self.adapter.close()
        self.memory.free(self.objects)


def main():
    bench = Bench(sys.argv[1], *map(int, sys.argv[2:]))
    with open(3, "w") as answers:
        print(json.dumps({"huge": bench.huge}), file=answers, flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(getattr(bench, command.pop("do"))(**command)), file=answers, flush=True)
    bench.close()


if __name__ == "__main__":
    main()
