"""Drives the benchmark from the host: bench.py REPORT.json (bench.sh sets what it reads from the environment).

Disks vary from second to second, so each ratio is the median of those inside of rounds: in a round all
contenders run one after the other, in an order that turns around with each round. Cold means that this
machine's memory has nothing of it; the host of a virtual disk may, for all contenders alike.
"""

import contextlib
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
from statistics import median

REPO = pathlib.Path(__file__).resolve().parents[2]
CORE = REPO / "collections/ansible_collections/sikkatu/kvpersist"
ROOT = pathlib.Path(os.environ["BENCH_ROOT"])
QUICK = os.environ.get("BENCH_QUICK") == "1"
MILLION = os.environ.get("BENCH_MILLION") == "1"

#: Even: as many in one order as in the other.
PAIRS = 2 if QUICK else 8
MIB = 1 << 20
#: Of each store and load: long enough to be clocked, short enough that a round is one moment of the disk.
TOTAL_MIB = 128 if QUICK else 1024
FILES = 2000 if QUICK else 100_000
FIO_JOBS = 4
GB, MB = 10**9, 10**6

rows = []
report = {"quick": QUICK, "pairs": PAIRS, "rows": rows, "samples": {}, "notes": []}


def say(text):
    started = int(os.environ.get("KVP_STARTED", time.time()))
    print(f"\033[1m[{int(time.time()) - started:4d}s] {text}\033[0m", file=sys.stderr, flush=True)


def note(text):
    if text not in report["notes"]:
        report["notes"].append(text)
        say(text)


def row(what, figure, unit, at_least=None, at_most=None):
    """One line of the table; a figure without a target stands there to be compared."""
    if at_least is None and at_most is None:
        target, verdict = "", ""
    elif at_least is not None:
        target, verdict = f"at least {at_least:g} {unit}", "ok" if figure >= at_least else "MISSED"
    else:
        target, verdict = f"at most {at_most:g} {unit}", "ok" if figure <= at_most else "MISSED"
    rows.append({"what": what, "figure": figure, "unit": unit, "target": target, "verdict": verdict})
    say(f"{what}: {figure:.3g} {unit} {f'({target}: {verdict})' if target else ''}")


def not_run(what, why):
    rows.append({"what": what, "figure": None, "unit": "", "target": why, "verdict": "NOT RUN"})


def ratio(over, under):
    """Median of the ratios inside of each round."""
    return median(a / b for a, b in zip(over, under))


def cold(directory):
    """Nothing of the directory is in memory any more, and nothing is left to be written."""
    os.sync()
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        note("drop_caches is not allowed here: bytes of files are cold, names and inodes are not")
        for path in directory.rglob("*"):
            if path.is_file():
                file = os.open(path, os.O_RDONLY)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)


def quiet(section):
    """Says so when others take the CPUs."""
    before, started = pathlib.Path("/proc/stat").read_text().split()[1:5], time.monotonic()
    time.sleep(2)
    after, seconds = pathlib.Path("/proc/stat").read_text().split()[1:5], time.monotonic() - started
    idle = (int(after[3]) - int(before[3])) / os.sysconf("SC_CLK_TCK") / seconds / os.cpu_count()
    if idle < 0.9:
        note(f"{section}: others take {1 - idle:.0%} of the CPUs, so take its figures with care")


def turned(things, number):
    return list(things) if number % 2 == 0 else list(things)[::-1]


def in_image(name, script, *arguments, mounts=()):
    """Command line of a script of this directory in the serving image; its file descriptor 3 is our pipe,
    since what LMCache logs goes to its standard output."""
    lib = [f"{CORE}/plugins/module_utils/kvpersist", f"{CORE}/roles/kvp_lmcache/files/kvpersist_lmcache"]
    volumes = [f"{path}:/lib/kvp/{os.path.basename(path)}:ro" for path in lib]
    volumes += [f"{REPO}/tests/bench/{script}:/{script}:ro", *mounts]
    return [
        *("docker", "run", "--rm", "-i", "--network", "none", "--name", f"kvpersist-bench-{name}"),
        *(word for volume in volumes for word in ("-v", volume)),
        *("-e", "HOME=/tmp", "-e", "PYTHONDONTWRITEBYTECODE=1", "-e", "PYTHONPATH=/lib/kvp"),
        *("-e", "LMCACHE_TRACK_USAGE=false", os.environ["SERVING_IMAGE"]),
        *("sh", "-c", 'exec "$@" 3>&1 >&2', "sh", "/opt/venv/bin/python", f"/{script}", *map(str, arguments)),
    ]


# -- store and load --------------------------------------------------------------------------


class Adapter:
    """An adapter of LMCache in a process of its own, which does what it is told line by line."""

    def __init__(self, name, object_mib, count):
        self.root = ROOT / name
        self.root.mkdir(exist_ok=True)
        command = in_image(name, "store_bench.py", name, object_mib, count, mounts=[f"{self.root}:/bench"])
        self.log = open(ROOT / f"{name}.log", "wb")  # noqa: SIM115  # open as long as the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        if not self.answer()["huge"]:
            note(f"{name}: the L1 memory could not be put on huge pages, so that its speed is one of chance")

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.close()
            print(pathlib.Path(self.log.name).read_text(errors="replace")[-3000:], file=sys.stderr)
            raise SystemExit(f"error: {self.root.name} ended; above is the end of its log")
        return json.loads(line)

    def run(self, action, **more):
        print(json.dumps({"do": action, **more}), file=self.process.stdin, flush=True)
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.log.close()
        shutil.rmtree(self.root)


class Fio:
    """What the disk gives: the same files and the same system calls, without LMCache and without Python."""

    def __init__(self, object_mib, count):
        self.root = ROOT / "fio"
        self.root.mkdir(exist_ok=True)
        self.bytes = object_mib * MIB * count
        self.arguments = [
            *("fio", "--output-format=json", "--name=bench", f"--directory={self.root}", f"--numjobs={FIO_JOBS}"),
            *(f"--bs={object_mib}m", f"--filesize={object_mib}m", f"--nrfiles={count // FIO_JOBS}"),
            *("--direct=1", "--ioengine=psync", "--fallocate=none", "--openfiles=1"),
            *("--file_service_type=sequential", "--thread"),
        ]

    def run(self, action):
        if action == "clear":
            for path in self.root.iterdir():
                path.unlink()
            return {}
        more = ["--rw=read"] if action == "load" else ["--rw=write", "--create_on_open=1", "--end_fsync=1"]
        huge = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # as the L1 memory of the adapters
        shown = subprocess.run([*self.arguments, *more], check=True, capture_output=True, text=True, env=huge)
        jobs = json.loads(shown.stdout[shown.stdout.index("{") :])["jobs"]
        side = "read" if action == "load" else "write"
        moved = sum(job[side]["io_bytes"] for job in jobs)
        if moved != self.bytes:
            raise SystemExit(f"error: fio moved {moved} bytes, not {self.bytes}")
        return {"seconds": max(job["job_runtime"] for job in jobs) / 1000, "bytes": moved}


def store_and_load(object_mib):
    count = max(TOTAL_MIB // object_mib, FIO_JOBS)
    quiet(f"{object_mib} MiB objects")
    say(f"{object_mib} MiB objects: {PAIRS} rounds of {count} objects; starting the two adapters")
    ours, stock = (Adapter(name, object_mib, count) for name in ("kvpersist", "nixl_store_dynamic"))
    fio = Fio(object_mib, count)
    contenders = {"stock": stock, "ours": ours, "fio": fio}
    seen = {action: {name: [] for name in contenders} for action in ("store", "load")}
    crc = {"on": [], "off": []}
    for number in range(PAIRS):
        say(f"{object_mib} MiB objects: round {number + 1} of {PAIRS}")
        for name in turned(contenders, number):
            # The second store is the one that counts: memory that a virtual machine did not touch for
            # seconds is slow to get, which cost a page cache three times the CPU of a server that goes on storing.
            contenders[name].run("store")
            contenders[name].run("clear")
            os.sync()
            seen["store"][name].append(contenders[name].run("store"))
        for name in turned(contenders, number):
            cold(ROOT)
            seen["load"][name].append(contenders[name].run("load"))
        # There and back (on, off, off, on): read again, files come faster than the first time,
        # since the host of a virtual disk has a cache too.
        for state in turned(crc, number) + turned(crc, number + 1):
            cold(ROOT)
            crc[state].append(ours.run("load", crc=state == "on"))
        for contender in contenders.values():
            contender.run("clear")
    ours.close()
    stock.close()
    report["samples"][f"{object_mib} MiB"] = {**seen, "crc": crc}
    for action, samples in seen.items():
        name = "cold load" if action == "load" else "durable store"
        speed = {who: [one["bytes"] / one["seconds"] / GB for one in runs] for who, runs in samples.items()}
        for who, label in (
            ("ours", "the store"),
            ("stock", "stock nixl_store_dynamic"),
            ("fio", "fio, direct, 4 jobs"),
        ):
            row(f"{name}, {object_mib} MiB: {label}", median(speed[who]), "GB/s")
        row(f"{name}, {object_mib} MiB: the store / stock", ratio(speed["ours"], speed["stock"]), "x", at_least=1.6)
        row(f"{name}, {object_mib} MiB: the store / fio", ratio(speed["ours"], speed["fio"]), "x", at_least=0.95)
        cpu = {who: [one["cpu"] / one["bytes"] * GB for one in samples[who]] for who in ("ours", "stock")}
        row(f"{name}, {object_mib} MiB: CPU of the store", median(cpu["ours"]), "s/GB")
        if action == "load":
            without = [one["cpu"] / one["bytes"] * GB for one in crc["off"]]
            row(f"{name}, {object_mib} MiB: CPU of the store with CRC off", median(without), "s/GB")
        row(f"{name}, {object_mib} MiB: CPU of stock", median(cpu["stock"]), "s/GB")
        limit = {"at_most": 0.333} if action == "load" else {}
        row(f"{name}, {object_mib} MiB: CPU of the store / of stock", ratio(cpu["ours"], cpu["stock"]), "x", **limit)
    spent = {state: [a["seconds"] + b["seconds"] for a, b in zip(runs[::2], runs[1::2])] for state, runs in crc.items()}
    row(f"cold load, {object_mib} MiB: speed, CRC on / CRC off", ratio(spent["off"], spent["on"]), "x", at_least=0.97)


# -- codec -----------------------------------------------------------------------------------


def codec():
    quiet("codec")
    say("codec: KV of SmolLM2-135M on real text, then packing and unpacking it")
    command = in_image(
        "codec", "codec_bench.py", 1 if QUICK else 8, 3 * PAIRS, mounts=[f"{os.environ['MODEL_DIR']}:/model:ro"]
    )
    with open(ROOT / "codec.log", "w+") as log:
        run = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
        if run.returncode:
            log.seek(0)
            raise SystemExit(f"{log.read()[-3000:]}\nerror: codec_bench.py ended with {run.returncode}")
    seen = json.loads(run.stdout)
    report["samples"]["codec"] = seen
    size = f"{seen['chunks']} chunks, {seen['raw_bytes'] / MB:.0f} MB"
    row(f"zstd, bf16 KV ({size}): raw file / file (stretch 1.50)", seen["ratio"]["bf16"], "x", at_least=1.45)
    row("zstd, the same KV cast to fp16: raw file / file", seen["ratio"]["fp16"], "x")
    row("zstd, the same KV cast to fp8 (e4m3): raw file / file", seen["ratio"]["fp8"], "x")
    for action, target in (("encode", {"at_least": 1.3}), ("decode", {"at_least": 1.3}), ("sha256", {})):
        one, two = ([seen["raw_bytes"] / seconds / GB for seconds in seen[action][threads]] for threads in ("1", "2"))
        label = "SHA-256, to compare" if action == "sha256" else f"zstd {action}"
        row(f"{label}, 1 thread", median(one), "GB/s")
        row(f"{label}, 2 threads", median(two), "GB/s")
        row(f"{label}, 2 threads / 1 thread", ratio(two, one), "x", **target)


# -- index -----------------------------------------------------------------------------------


class Directory:
    """A cache root of many files, and the programs that read it."""

    def __init__(self, name, count):
        self.root, self.empty = ROOT / name, ROOT / f"{name}-empty"
        self.index = self.root / ".kvpersist/index"
        self.count = count
        # Compiled once, as on a VM, and not into the checkout.
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{CORE}/plugins/module_utils",
            "PYTHONPYCACHEPREFIX": str(ROOT / "pycache"),
        }
        say(f"making {count} files")
        for root, number in ((self.root, count), (self.empty, 1)):
            self.python("make", root, number)
            self.python("save", root)

    def python(self, *words):
        command = [sys.executable, str(REPO / "tests/bench/index_bench.py"), *map(str, words)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=self.environment)
        return json.loads(run.stdout)

    def find(self, root):
        return ["find", str(root), "-printf", "%f %s %b %T@\\n"]

    def admin(self, root):
        config = ROOT / "config"
        return [sys.executable, "-m", "kvpersist.cli", "--config-dir", str(config), "report", "--root", str(root)]

    def timed(self, command):
        started = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=self.environment)
        return time.monotonic() - started

    def scan(self, root):
        aside = root / ".kvpersist/aside"
        (root / ".kvpersist/index").rename(aside)
        try:
            return self.python("open", root)
        finally:
            aside.rename(root / ".kvpersist/index")

    def seconds(self, reader, root):
        if reader in ("scan", "saved"):
            seen = self.scan(root) if reader == "scan" else self.python("open", root)
            if seen["saved"] != (reader == "saved") or seen["count"] != (self.count if root == self.root else 1):
                raise SystemExit(f"error: {reader} of {root} gave {seen}")
            return seen["seconds"]
        return self.timed((self.find if reader == "find" else self.admin)(root))

    def cold_seconds(self, reader):
        """The directory is cold, the program is not: the disk reads the latter once on a small root."""
        cold(ROOT)
        self.seconds(reader, self.empty)
        return self.seconds(reader, self.root)

    def rounds(self, pairs):
        """Seconds of find and of each of our readers, side by side."""
        seen = {ours: {"find": [], ours: []} for ours in ("scan", "saved", "report")}
        for number in range(pairs):
            say(f"index of {self.count} files: round {number + 1} of {pairs}")
            for samples in turned(seen.values(), number):
                for reader in turned(samples, number):
                    samples[reader].append(self.cold_seconds(reader))
        return seen


def index():
    config = ROOT / "config"
    config.mkdir()
    (config / "identity.env").write_text("KVP_NAMESPACE=kvp-bench\nKVP_MODEL=bench-kvp-bench\n")
    directory = Directory("index", FILES)
    quiet("index")
    seen = directory.rounds(PAIRS)
    report["samples"]["index"] = seen
    size = f"{FILES // 1000}k files, cold"
    labels = {"scan": "index by reading the root", "saved": "saved index", "report": "kvp-admin report"}
    for ours, samples in seen.items():
        row(f"{size}: {labels[ours]}", median(samples[ours]), "s")
        row(f"{size}: find beside it", median(samples["find"]), "s")
        if ours == "saved":
            row(f"{size}: find / {labels[ours]}", ratio(samples["find"], samples[ours]), "x", at_least=5)
        else:
            row(f"{size}: {labels[ours]} / find", ratio(samples[ours], samples["find"]), "x", at_most=1.3)
    start = [directory.seconds("report", directory.empty) for _ in range(PAIRS)]
    report["samples"]["report of an almost empty root"] = start
    row("kvp-admin report of one file, warm: its start", median(start), "s")
    count, times = FILES, 10**6 // FILES
    if MILLION:
        shutil.rmtree(directory.root)
        directory, count, times = Directory("million", 10**6), 10**6, 1
        report["samples"]["million"] = seen = directory.rounds(1)
        for ours, samples in seen.items():
            row(f"1M files, cold, one run: {labels[ours]}", samples[ours][0], "s")
            row("1M files, cold, one run: find beside it", samples["find"][0], "s")
    size = "1M files" if MILLION else f"{count // 1000}k files x {times}, an estimate for 1M"
    memory = {
        "index by reading the root": directory.scan(directory.root),
        "saved index": directory.python("open", directory.root),
        "kvp-admin report": directory.python("report", directory.root),
    }
    report["samples"]["memory"] = {"files": count, **memory}
    for label, shown in memory.items():
        row(f"memory, {size}: {label}", shown["growth_bytes"] * times / MB, "MB", at_most=250)
    if not MILLION:
        not_run("memory of a million files", "BENCH_MILLION=1 runs it")


# -- all of it -------------------------------------------------------------------------------


def machine():
    shown = subprocess.run(["df", "--output=source,fstype", str(ROOT)], check=True, capture_output=True, text=True)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device, kind = shown.stdout.split()[-2:]
    return f"{os.cpu_count()} CPUs, {memory / 2**30:.0f} GiB, {kind} on {device}, Linux {platform.release()}"


def table():
    lines = [f"{machine()}; medians of {PAIRS} rounds{'; BENCH_QUICK: the figures mean nothing' if QUICK else ''}", ""]
    lines += ["| measured | figure | target | |", "| --- | ---: | --- | --- |"]
    for each in rows:
        figure = "" if each["figure"] is None else f"{each['figure']:.3g} {each['unit']}"
        lines.append(f"| {each['what']} | {figure} | {each['target']} | {each['verdict']} |")
    missed = sum(each["verdict"] == "MISSED" for each in rows)
    judged = sum(each["verdict"] in ("ok", "MISSED") for each in rows)
    return "\n".join([*lines, "", *report["notes"], f"{judged - missed} of {judged} targets met, {missed} missed"])


def main():
    report["machine"] = machine()
    with contextlib.suppress(OSError):
        report["load_average"] = os.getloadavg()
    for object_mib in (8, 32):
        store_and_load(object_mib)
    codec()
    index()
    pathlib.Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")
    print(table())


if __name__ == "__main__":
    main()
