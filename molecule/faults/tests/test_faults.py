"""The failure model, row by row: break it under load, repair it, and hold every answer against the recompute.

In the order of the table in docs/en/failures.md. A row that kills vLLM may lose what it was answering. `make test`
breaks what breaks most often; `make faults` and `make test-all` break everything.
"""

import os
import time

import pytest
from conftest import BUDGET, DEADLINE, GATE, LMCACHE, ROOT, VLLM, inside
from play import long

#: A client's requests in flight on a vLLM that is killed.
IN_FLIGHT = 4


# -- the chunks on the disk ------------------------------------------------------------------


def test_a_partial_hit(on, row):
    """The later half of each chat is gone: its first part is served, the rest computed and stored again."""
    with row("the later half of the chunks removed") as chats:
        with chats.away():
            on.sh(f"cd {ROOT} && rm {' '.join(on.chunks()[-8:])}")
            since = on.now()
        chats.wait_hit(since)
        chats.wait_answers(16)
        longest = max(record["tokens"] for record in chats.answers())
        later = [record["cached"] for record in chats.answers(since) if record["tokens"] == longest]
        assert [cached for cached in later if 0 < cached < max(later)]


#: Valid frames that are no answer to what is asked: another layout, another chunk, another release.
INCOMPATIBLE = """
import os, sys
sys.path.insert(0, "/usr/lib/kvpersist")
from crc32c import crc32c
from kvpersist import objects
for number, path in enumerate(sys.argv[1:]):
    with open(path, "r+b") as file:
        page, body = file.read(objects.HEADER_BYTES), file.read()
        frame = objects.read_header(memoryview(page))
        key, layout = frame.key, frame.layout
        if number % 3 == 0:
            layout = layout.replace("float32", "float16")
        elif number % 3 == 1:
            key = objects.ChunkKey(key.model_name, key.chunk_hash, key.kv_rank, key.object_group, "another")
        new = objects.Frame(key, layout, frame.codec, frame.raw_length, frame.stored_length)
        page = bytearray(new.sealed(memoryview(body)[: frame.stored_length], crc32c))
        if number % 3 == 2:
            page[8] ^= 0x7F
        file.seek(0)
        file.write(page)
"""


@long
def test_an_incompatible_entry(on, row):
    with row("frames of another layout, key and release") as chats:
        with chats.away():
            paths = " ".join(f"{ROOT}/{name}" for name in on.chunks()[-12:])
            on.sh("/usr/lib/kvpersist/lmcache-venv/bin/python -c %s " + paths, INCOMPATIBLE)
        chats.wait_answers(16)
        on.counted("kvp_checksum_misses")


def test_damaged_and_swapped_files(on, row):
    with row("flipped, cut, emptied and swapped files") as chats:
        with chats.away():
            names = on.chunks()[-16:]
            damage = [
                "printf x | dd of={0} bs=1 seek=100000 conv=notrunc status=none",
                "truncate -s 5000 {0}",
                "truncate -s 0 {0}",
                "cp {0} /root/one && cp {1} {0} && cp /root/one {1}",
            ]
            for number, command in enumerate(damage * 3):
                on.sh(f"cd {ROOT} && " + command.format(names[number], names[number + 4]))
        chats.wait_answers(16)
        on.counted("kvp_checksum_misses")
        on.counted("kvp_healed_chunks")


def test_an_interrupted_write(on, row):
    """Killed with half of a chunk written: the rest of it is an unfinished file that nobody reads."""
    with row("lmcache killed while it writes a chunk") as chats:
        before = on.sh(f"ls {ROOT}").split()
        on.sh(f"rm {ROOT}/*.bin")  # so that there is something to write
        with on.drop_in(*inside("die-writing")):
            on.wait_killed()
            chats.wait_answers(4)
        left = [name for name in on.sh(f"ls {ROOT}").split() if ".bin.tmp." in name and name not in before]
        assert left
    assert on.run("kvp-admin verify").rc == 0


@long
def test_a_write_that_was_not_published(on, row):
    with row("lmcache killed before a chunk has its name") as chats:
        on.sh(f"rm {ROOT}/*.bin")
        with on.drop_in(*inside("die-publishing")):
            on.wait_killed()
            chats.wait_answers(4)
    assert on.run("kvp-admin verify").rc == 0


def test_an_interrupted_eviction(on, row):
    """Killed half-way through what had to leave: what is left is whole, and within the budget."""
    with row("lmcache killed while it evicts") as chats:
        name = on.chunks()[-1]
        on.sh(f"cd {ROOT} && cp {name} /root/one && rm *.bin")
        fits = int(0.97 * BUDGET / 1.01 / 2**20)
        on.sh(
            f"cd {ROOT} && for n in $(seq 100001 {100000 + fits}); do f={name[:-10]}$n.bin;"
            " cp /root/one $f; chown kvpersist: $f; touch -d '2 days ago' $f; done"
        )
        with on.drop_in(*inside("die-evicting")):
            on.wait_killed()
            chats.wait_answers(4)
            assert int(on.sh(f"ls {ROOT}/{name[:-10]}1*.bin | wc -l")) < fits
            on.sh(f"rm {ROOT}/{name[:-10]}1*.bin")
    assert int(on.sh(f"du -s --block-size=1 {ROOT}").split()[0]) <= BUDGET


# -- the disk --------------------------------------------------------------------------------


def test_a_full_disk(on, row):
    with row("disk full") as chats:
        for size in ("1G", "100M", "10M", "1M"):
            on.run(f"for n in 1 2 3 4 5 6 7 8 9; do fallocate -l {size} {ROOT}/filler-{size}-$n || break; done")
        on.run(f"dd if=/dev/zero of={ROOT}/filler bs=4k status=none")
        chats.others()
        on.counted("kvp_refused_stores", reason="budget")
        on.complains("full")
        on.sh(f"rm {ROOT}/filler*")


@long
def test_a_used_up_budget(on, row):
    """By a model of before, which nothing evicts: no stores, until a person cleans up."""
    with row("budget used up by dead files") as chats:
        name = on.chunks()[-1]
        at = name.index("kvp-") + len("kvp-")
        with chats.away():
            on.sh(f"cd {ROOT} && rm *.bin && fallocate -l {int(BUDGET) - 2**20} {name[:at]}{'0' * 32}{name[at + 32 :]}")
        on.counted("kvp_refused_stores", reason="budget")
        on.complains("kvp-admin cleanup --dead")
        on.sh("kvp-admin cleanup --dead --apply")
        chats.others()  # what was refused is in LMCache's memory, and not offered again until it leaves that
        on.wait("a store", 30, on.chunks)


@long
def test_a_disk_that_is_gone(on, row):
    """The file system is shut down under the server: every access fails from then on."""
    with row("NVMe gone (file system shut down)") as chats:
        on.sh(f"xfs_io -x -c shutdown {ROOT}")
        chats.others()
        on.counted("kvp_failed_stores", reason="EIO")
        on.complains(ROOT)
        on.sh(f"systemctl stop {LMCACHE} && umount {ROOT} && mount {ROOT} && systemctl start {LMCACHE}")


@long
def test_a_read_only_remount(on, row):
    with row("remounted read-only") as chats:
        on.sh(f"mount -o remount,ro {ROOT}")
        chats.others()
        on.counted("kvp_failed_stores", reason="EROFS")
        on.complains("read-only")
        on.sh(f"mount -o remount,rw {ROOT}")


@long
def test_a_full_dev_shm(on, row):
    """vLLM and lmcache hand chunks to each other there; what was not touched yet is not theirs any more."""
    with row("/dev/shm full", lost=IN_FLIGHT, deadline=60) as chats:
        on.run("fallocate -l 64G /dev/shm/filler; dd if=/dev/zero of=/dev/shm/filler2 bs=1M status=none")
        time.sleep(8)
        on.sh("rm -f /dev/shm/filler /dev/shm/filler2")
        chats.wait_answers(4)


# -- the processes ---------------------------------------------------------------------------


def test_lmcache_is_killed(on, row):
    with row("lmcache SIGKILL"):
        on.kill(LMCACHE)


def test_lmcache_takes_connections_and_never_answers(on, row):
    """Stopped, so its ports stay open: each request waits LMCache's timeout at most, and is computed."""
    with row("lmcache SIGSTOP for 25 s") as chats:
        on.kill(LMCACHE, "STOP")
        since = on.now()
        try:
            time.sleep(15)
            on.complains("does not answer")
            time.sleep(10)
            assert len(chats.answers(since)) >= IN_FLIGHT
        finally:
            on.kill(LMCACHE, "CONT")


@long
def test_the_gate_is_killed(on, row):
    with row("gate SIGKILL"):
        on.kill(GATE)


@long
def test_the_gate_is_stopped(on, row):
    """A gate that does not look changes nothing; when it goes on, it sees what happened meanwhile."""
    with row("gate SIGSTOP, and lmcache SIGKILL"):
        on.kill(GATE, "STOP")
        on.kill(LMCACHE)
        time.sleep(5)
        on.kill(GATE, "CONT")


@long
def test_vllm_is_stopped(on, row):
    """It owes nothing until it goes on."""
    with row("vLLM SIGSTOP for 8 s", deadline=DEADLINE + 8):
        on.kill(VLLM, "STOP")
        time.sleep(8)
        on.kill(VLLM, "CONT")


def test_vllm_is_killed(on, row):
    on.sh("echo x > /dev/shm/psm_left && chown kvpersist /dev/shm/psm_left && echo x > /dev/shm/psm_of_root")
    with row("vLLM SIGKILL", lost=IN_FLIGHT):
        on.kill(VLLM)
    # What killed processes leave there goes at the next start, and nothing else.
    assert on.run("test -e /dev/shm/psm_left").rc != 0
    on.sh("rm /dev/shm/psm_of_root")
    # Nor does the lmcache server hold the memory of the vLLM that was killed.
    assert on.run(f"grep 'lmcache_kv_.*deleted' /proc/{on.pid(LMCACHE)}/maps").rc == 1


@long
def test_vllm_crashes_again_and_again(on, row):
    """Each of them had 1 GB of /dev/shm, of which there are 4: the start gives back what the last one had."""
    with row("vLLM SIGKILL, five times", lost=5 * IN_FLIGHT):
        for _ in range(5):
            on.kill(VLLM)
            on.wait_vllm()


def test_clients_go_away_while_their_chat_is_loaded(on, row):
    """What every chat window has a button for. Without the plugin it ends vLLM for everybody, nearly each time."""
    with row("clients that go away") as chats:
        pid = on.pid(VLLM)
        for _ in range(10):
            chats.wait_hit(on.now())
            on.sh("systemctl kill --signal KILL chats")
            on.wait("the clients' end", 10, on.without_clients)
            chats.start()
        chats.wait_answers(8)
        assert on.pid(VLLM) == pid


@long
def test_lmcache_is_away_when_vllm_starts(on, row):
    """It serves uncached and says so, until vLLM is restarted."""
    with row("no lmcache when vLLM starts", lost=2 * IN_FLIGHT, stops=True) as chats:
        with on.drop_in("[Unit]\nConditionPathExists=/never"):
            on.run(f"systemctl stop {LMCACHE}")
            on.kill(VLLM)
            since = on.now()
            chats.wait_answers(4)
            assert {record["cached"] for record in chats.answers(since)} == {0}
            on.complains("vLLM serves uncached")
        on.sh(f"systemctl start {LMCACHE} && systemctl restart {VLLM}")


@long
def test_docker_is_restarted(on, row):
    with row("docker restarted", lost=IN_FLIGHT, stops=True):
        on.sh("systemctl restart docker")


@long
def test_docker_is_killed(on, row):
    """The container is left over, under the name that the next one wants."""
    with row("dockerd SIGKILL", lost=IN_FLIGHT, stops=True):
        on.kill("docker")


@long
def test_the_clock_jumps(on, row):
    """For the lmcache server alone: a month ahead, and back."""
    with row("clock of lmcache +30 days, -30 days") as chats:
        on.sh("echo 0 > /srv/faults/clock")
        with on.drop_in(*inside("clock")):
            for seconds in (30 * 86400, -30 * 86400):
                on.sh(f"echo {seconds} > /srv/faults/clock")
                chats.wait_hit(on.now())
                chats.wait_answers(8)
        on.sh(f"systemctl restart {LMCACHE}")


# -- the host --------------------------------------------------------------------------------


@long
def test_a_power_cut(on, row):
    """What was not flushed is lost: processes, memory and the file system at once."""
    with row("power cut", lost=IN_FLIGHT, stops=True):
        vllm, lmcache = on.pid(VLLM), on.pid(LMCACHE)
        on.sh(f"xfs_io -x -c shutdown {ROOT}; kill -9 {vllm} {lmcache}; systemctl stop {LMCACHE} {VLLM}")
        on.sh(f"umount {ROOT} && mount {ROOT} && systemctl start {LMCACHE} {VLLM}")
    assert on.run("kvp-admin verify").rc == 0


@long
def test_a_reboot(on, row):
    with row("reboot", lost=IN_FLIGHT, stops=True) as chats:
        on.reboot()
        on.wait_vllm()
        chats.start()


# -- all at once, and nothing at all -----------------------------------------------------------


@long
def test_eight_clients_over_restarts(on, row):
    with row("8 clients, restarts in between", clients=8, lost=2 * 8, stops=True) as chats:
        chats.wait_answers(40)
        on.kill(LMCACHE)
        chats.wait_answers(60)
        on.kill(VLLM)
        chats.wait_answers(40)
        on.sh(f"systemctl restart {LMCACHE} {VLLM}")
        chats.wait_answers(60)


@pytest.mark.skipif("KVP_SOAK_MINUTES" not in os.environ, reason="make soak")
def test_soak(on, row):
    """Round after round of kills and restarts; nothing piles up."""
    # What is done, and whether it may cost a vLLM's requests in flight.
    breaks = (
        (lambda: on.kill(LMCACHE), False),
        (lambda: on.kill(VLLM), True),
        (lambda: on.sh(f"systemctl restart {VLLM}"), True),
        (lambda: on.sh(f"systemctl restart {LMCACHE} {VLLM}"), True),
    )
    number, end = 0, time.monotonic() + 60 * int(os.environ["KVP_SOAK_MINUTES"])
    while number < len(breaks) or time.monotonic() < end:
        do, lossy = breaks[number % len(breaks)]
        with row(f"soak, round {number + 1}", clients=8, lost=2 * IN_FLIGHT if lossy else 0, stops=lossy) as chats:
            do()
            chats.wait_answers(100)
        number += 1
        assert int(on.sh(f"du -s --block-size=1 {ROOT}").split()[0]) <= BUDGET
        assert len(on.sh("ls /dev/shm").split()) <= 8
        assert on.sh("docker ps --all --quiet | wc -l") == "1"


def test_a_build_without_checks_is_found_out(on, streamed):
    """The matrix can fail: a server that checks no frame serves another chunk's KV, and the answers are wrong."""
    with on.drop_in(*inside("no-checks")), streamed("no-checks") as chats:
        with chats.away():
            names = on.chunks()[-16:]
            for one, two in zip(names[:8], names[8:]):  # each prefix with the KV of the other one
                on.sh(f"cd {ROOT} && cp {one} /root/one && cp {two} {one} && cp /root/one {two}")
        chats.wait_answers(40)
    print(chats.seen)
    assert chats.seen["wrong"]
    on.sh(f"rm {ROOT}/*.bin && systemctl restart {LMCACHE}")


@long
def test_a_host_without_the_identity_wall_is_found_out(on, streamed):
    """Other weights of the same shape under the same name, with the launcher's check of them deceived."""
    with streamed("no-identity") as first:
        first.wait_answers(8)
    assert first.seen["wrong"] == []
    on.sh("cp /etc/kvpersist/vllm.json /root/vllm.json")
    on.sh("mv /srv/tiny/model /srv/tiny/kept && cp -r /srv/tiny/other /srv/tiny/model")
    on.sh("python3 -c %s", DECEIVE)
    try:
        on.sh(f"systemctl restart {VLLM}")
        with streamed("no-identity") as chats:
            chats.wait_hit(on.now())
            chats.wait_answers(4)
        assert chats.seen["wrong"]
    finally:
        on.sh(
            "rm -r /srv/tiny/model && mv /srv/tiny/kept /srv/tiny/model && mv /root/vllm.json /etc/kvpersist/vllm.json"
        )
        on.sh(f"rm {ROOT}/*.bin && systemctl restart {LMCACHE} {VLLM}")


DECEIVE = """
import json, sys
sys.path.insert(0, "/usr/lib/kvpersist")
from kvpersist import weights
config = json.load(open("/etc/kvpersist/vllm.json"))
config["weights_fingerprint"] = weights.fingerprint(config["model_dir"])
json.dump(config, open("/etc/kvpersist/vllm.json", "w"))
"""
