"""Fixtures of the scenario: the provisioned host, chats streamed while a row is on, and the matrix at the end."""

import contextlib
import json
import pathlib
import re
import subprocess
import sys
import time

import pytest
import yaml

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/hosts"))

from play import REPO, Play, figure, journal_of_what_failed, told  # noqa: E402  (the path above comes first)

ROOT = "/var/lib/kvpersist"
LMCACHE, VLLM, GATE = "kvpersist-lmcache", "kvpersist-vllm", "kvpersist-gate"
DROP_IN = f"/run/systemd/system/{LMCACHE}.service.d"
#: Disk budget of the inventory, in bytes.
BUDGET = 0.3e9
MARKER = "/var/cache/kvpersist/killed"
#: Seconds that a request may take while only the cache is broken: LMCache's timeout of 10 s, for lookup and for load.
DEADLINE = 30
#: Seconds until chats are served from the cache again after a repair.
RECOVERY = 90

MATRIX = []


def inside(fault):
    """Lines of the unit for a fault of sitecustomize.py."""
    return [f"Environment=KVP_FAULT={fault} PYTHONPATH=/usr/lib/kvpersist:/srv/faults"]


class Host:
    """The host under test: its processes, its cache, its chats."""

    def __init__(self, host, name):
        self.host, self.name = host, name
        self.sh = host.check_output
        self.run = host.run

    def pid(self, unit):
        """Main process of a unit; of vLLM, that of its container."""
        if unit == VLLM:
            return self.sh("docker inspect --format '{{.State.Pid}}' tiny-kvp")
        return self.sh(f"systemctl show --property MainPID --value {unit}")

    def kill(self, unit, signal="KILL"):
        self.sh(f"kill -{signal} {self.pid(unit)}")

    def status(self):
        """(exit code, problems) of kvp-admin status."""
        run = self.run("kvp-admin status --json")
        return run.rc, json.loads(run.stdout)["problems"]

    def complains(self, text):
        """kvp-admin status fails, and says that."""
        code, problems = self.status()
        assert code == 1
        assert text in " ".join(problems)

    def wait_vllm(self):
        """Until vLLM answers again."""
        self.wait("vLLM", 120, lambda: self.run("curl -sf http://127.0.0.1:8000/health").rc == 0)

    def wait_killed(self):
        """Until the fault inside the lmcache server has killed it."""
        self.wait("the kill", 60, lambda: self.run(f"test -e {MARKER}").rc == 0)

    def metric(self, name, **labels):
        """Sum of a figure of the lmcache server's own /metrics; None while it does not answer."""
        run = self.run("curl -sf --max-time 5 http://127.0.0.1:8080/metrics")
        return figure(run.stdout, name, **labels) if run.rc == 0 else None

    def without_clients(self):
        return self.sh("systemctl show --property LoadState --value chats") == "not-found"

    def counted(self, name, **labels):
        """Until that figure of the lmcache server is above 0."""
        self.wait(name, 60, lambda: (self.metric(name, **labels) or 0) > 0)

    def chunks(self):
        """Names of the chunk files in the order in which they were made; a row's two prefixes are the last 16."""
        lines = self.sh(f"cd {ROOT} && find . -name '*.bin' -exec stat --format '%w %n' {{}} + | sort").splitlines()
        return [line.rpartition("/")[2] for line in lines]

    def now(self):
        return float(self.sh("date +%s.%N"))

    def wait(self, what, seconds, seen):
        """Until ``seen()`` is true."""
        deadline = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s; {self.run('kvp-admin status').stdout}"
            time.sleep(0.3)

    @contextlib.contextmanager
    def drop_in(self, *lines):
        """The lmcache server with these lines in its unit, restarted."""
        text = "\n".join(["[Service]", *lines, ""])
        self.sh(f"mkdir -p {DROP_IN} && printf %%s %s > {DROP_IN}/fault.conf && rm -f {MARKER}", text)
        self.sh(f"systemctl daemon-reload && systemctl restart {LMCACHE}")
        try:
            yield
        finally:
            # The marker stays: the server that runs has the fault still in it.
            self.sh(f"rm -r {DROP_IN} && systemctl daemon-reload")

    def heal(self):
        """What a row that failed may have left broken, so that the next one starts as usual."""
        self.run("systemctl stop chats; systemctl kill --signal CONT kvpersist-lmcache kvpersist-gate")
        self.run("docker kill --signal CONT tiny-kvp")
        self.run(f"rm -f /dev/shm/filler* {ROOT}/filler* {ROOT}/*kvp-{'0' * 32}*; mount -o remount,rw {ROOT}")
        self.run(f"rm -rf {DROP_IN}; systemctl daemon-reload; systemctl restart {LMCACHE} {VLLM}")

    def reboot(self):
        """As a VM does: what is in memory is gone, what is on the disks stays."""
        subprocess.run(["docker", "restart", "--time", "20", self.name], check=True, capture_output=True)
        subprocess.run([REPO / "tests/hosts/host.sh", "up", self.name], check=True, capture_output=True)


class Row:
    """One row of the matrix while its chats are streamed."""

    def __init__(self, on, name, clients):
        self.on, self.clients, self.repaired = on, clients, 0.0
        self.file = f"/srv/faults/{re.sub('[^a-z0-9]+', '-', name.lower())}.jsonl"
        self.seen = {}
        on.run("systemctl stop chats")  # of a row that failed
        on.sh(f"rm -f {self.file} {self.file}.stop")
        self.start()

    def start(self):
        """The clients; once more after the host was off."""
        command = f"python3 /srv/faults/load.py run {self.file} {self.clients}"
        self.on.sh(f"systemd-run --quiet --collect --unit chats {command}")

    def records(self):
        return [json.loads(line) for line in self.on.sh(f"cat {self.file} 2>/dev/null || true").splitlines()]

    def answers(self, since=0.0):
        return [record for record in self.records() if "ids" in record and record["started"] > since]

    def wait_answers(self, count):
        """So many more answers."""
        since = self.on.now()

        def come():
            assert self.on.run("systemctl is-active chats").rc == 0, self.on.sh("journalctl -b -o cat -u chats -n 20")
            return len(self.answers(since)) >= count

        self.on.wait(f"{count} answers", 120, come)

    def wait_hit(self, since):
        """Seconds from ``since`` to the first answer that was asked for later and served from the cache."""

        def hits():
            return [record["ended"] - since for record in self.answers(since) if record["cached"] > 0]

        self.on.wait("a chat served from the cache", RECOVERY, hits)
        return min(hits())

    def others(self):
        """Chats that nobody had before: they have to be stored."""
        self.on.sh(f"python3 /srv/faults/load.py run {self.file} 2 8 5")

    def leave(self):
        """The clients take their last answers and leave."""
        self.on.sh(f"touch {self.file}.stop")
        self.on.wait("the clients' end", 150, self.on.without_clients)

    @contextlib.contextmanager
    def away(self):
        """For what is done to the files; then the clients come back to a server that has nothing in memory."""
        self.leave()
        yield
        self.on.kill(LMCACHE)
        self.repaired = self.on.now()
        self.on.wait("the cache", RECOVERY, lambda: self.on.metric("kvp_admitted") == 1)
        self.on.sh(f"rm {self.file}.stop")
        self.start()

    def end(self):
        """Hold what the clients got against the recompute."""
        self.leave()
        self.seen = json.loads(self.on.sh(f"python3 /srv/faults/load.py check {self.file}"))
        return self.seen


@pytest.fixture
def streamed(on):
    """``with streamed(NAME) as chats:``; then ``chats.seen`` is what the recompute says of them, for good or bad."""

    @contextlib.contextmanager
    def run(name):
        chats = Row(on, name, 4)
        chats.wait_answers(16)  # each prefix was stored as a whole
        yield chats
        chats.end()

    return run


@pytest.fixture(scope="session")
def on(tmp_path_factory):
    """The host, provisioned as a user does it."""
    import testinfra

    name = "kvp-faults"
    host = testinfra.get_host(f"docker://{name}")
    play = Play(host, name)
    file = tmp_path_factory.mktemp("pins") / "pins.yml"
    code, output = play.book("identify.yml", kvp_identity_file=str(file))
    assert code == 0, told(output)
    code, output = play.site(**yaml.safe_load(file.read_text()))
    assert code == 0, told(output)
    return Host(host, name)


@pytest.fixture
def row(on):
    """``with row(NAME) as chats:`` breaks something, repairs it and leaves: then caching has to come back.

    ``lost`` is how many requests may be lost (those in flight on a vLLM that is killed), ``stops`` whether vLLM is told
    to stop, which it does after the requests that it has and without taking more; ``deadline`` is in seconds.
    """

    @contextlib.contextmanager
    def breaking(name, lost=0, stops=False, deadline=DEADLINE, clients=4):
        chats = Row(on, name, clients)
        try:
            chats.wait_answers(4 * clients)  # each prefix was stored as a whole
            yield chats
            recovered = chats.wait_hit(chats.repaired or on.now())
            on.wait("kvp-admin status says that all is well", RECOVERY, lambda: on.status()[0] == 0)
            seen = chats.end()
        except BaseException:
            on.heal()
            raise
        MATRIX.append({"fault": name, "recovered": recovered, **seen})
        assert seen["wrong"] == []
        assert seen["near_ties"] <= 0.1 * seen["answers"]
        assert len(seen["lost"]) <= lost, seen["lost"]
        assert stops or not seen["stopping"]
        assert seen["longest_seconds"] <= deadline

    return breaking


def pytest_terminal_summary(terminalreporter):
    """The matrix."""
    terminalreporter.write_line(
        f"{'fault':44} requests  hits  wrong  near ties  lost  not taken  longest stall  recovered in"
    )
    for seen in MATRIX:
        terminalreporter.write_line(
            f"{seen['fault']:44} {seen['answers']:8d}  {seen['hits']:4d}  {len(seen['wrong']):5d}  "
            f"{seen['near_ties']:9d}  {len(seen['lost']):4d}  {seen['stopping']:9d}  "
            f"{seen['longest_seconds']:11.1f} s  {seen['recovered']:10.1f} s"
        )


pytest_runtest_makereport = journal_of_what_failed
