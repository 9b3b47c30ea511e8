"""kvp-admin: look at the cache of this VM, and clean it up. It never runs by itself, and without
--apply it only reads.

Exit codes: 0 as asked; 1 something is not as it should be, and the output says what (status: vLLM is
not served from the cache; identity: its file was edited; verify: a chunk is damaged or unreadable;
cleanup: something could not be removed); 2 wrong use, or nothing could be done.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from typing import Any, Dict, List, Optional, Set

from . import render, retention, sizing, state
from .identity import CacheIdentity, fields_from_env
from .objects import Crc, base_model

#: The Python of LMCache, with what the store needs; kvp-admin runs on it where it is there.
PYTHON = "/usr/lib/kvpersist/lmcache-venv/bin/python"

#: Share of the budget that files of others may take before next to nothing is stored.
FULL_SHARE = 0.95

UNITS = ("kvpersist-lmcache", "kvpersist-vllm", "kvpersist-gate")


def _variables(config_dir: str, name: str) -> Dict[str, str]:
    path = os.path.join(config_dir, name)
    try:
        with open(path, encoding="utf-8") as file:
            return render.read_env_file(file.read())
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: provision this host with site.yml first") from None


def _identity(arguments: argparse.Namespace) -> CacheIdentity:
    if arguments.fields:
        with open(0 if arguments.fields == "-" else arguments.fields, encoding="utf-8") as file:
            document = json.load(file)
        if not isinstance(document, dict):
            raise ValueError(f"{arguments.fields} is no JSON object of the fields")
        return CacheIdentity.from_fields(document)
    variables = _variables(arguments.config_dir, "identity.env")
    if not variables.get("KVP_NAMESPACE"):
        raise ValueError(f"this host has no namespace: {variables.get('KVP_UNCACHED_REASON', 'serving uncached')}")
    return CacheIdentity.from_fields(fields_from_env(variables))


def identity(arguments: argparse.Namespace) -> int:
    """Namespace, model name and the canonical bytes of the pins."""
    found = _identity(arguments)
    document = {
        "namespace": found.namespace(),
        "model": found.lmcache_model_name(),
        "canonical": found.canonical_json().decode("ascii"),
    }
    if arguments.json:
        print(json.dumps(document))
    else:
        print("".join(f"{key:<10} {value}\n" for key, value in document.items()), end="")
    if arguments.fields:
        return 0
    written = _variables(arguments.config_dir, "identity.env")["KVP_NAMESPACE"]
    if written != found.namespace():
        print(f"identity.env was edited: it says {written}", file=sys.stderr)
        return 1
    return 0


def _unit_states() -> Dict[str, str]:
    shown = {}
    for unit in UNITS:
        run = subprocess.run(["systemctl", "is-active", unit], capture_output=True, text=True, check=False)
        shown[unit] = run.stdout.strip() or run.stderr.strip()
    return shown


_SAMPLE = re.compile(r"(kvp_[a-z_]+)(?:\{(?:.*,)?class=\"([a-z]+)\".*\}|\{.*\})? ([0-9.e+-]+)")


def _store_problems(arguments: argparse.Namespace, is_active: bool) -> List[str]:
    """Why nothing may be stored or read although the services run, and what to do."""
    problems = []
    text = _metrics(arguments.config_dir) if is_active else None
    if is_active and text is None:
        problems.append(
            "kvpersist-lmcache is active, but does not answer; requests wait for it, then go on uncached: "
            "systemctl restart kvpersist-lmcache"
        )
    root = _setting(arguments, "KVP_CACHE_ROOT")
    try:
        os.scandir(root).close()
        disk = os.statvfs(root)
    except PermissionError:
        problems.append(f"{root} is not for {os.environ.get('USER', 'this user')} to read: run kvp-admin as root")
        return problems
    except OSError as error:
        problems.append(
            f"{root} cannot be read: {error.strerror}. Is its disk there (dmesg, lsblk)? Then stop kvpersist-lmcache, "
            f"unmount and mount the mount point (findmnt -T {root}), and start kvpersist-lmcache"
        )
        return problems
    if disk.f_flag & os.ST_RDONLY:
        problems.append(
            f"{root} is mounted read-only, so nothing is stored: mount -o remount,rw "
            f"its mount point (findmnt -T {root})"
        )
    limits = _limits(arguments)
    if disk.f_bavail * disk.f_frsize <= limits["reserve"]:
        problems.append(
            f"the disk of {root} is full (free: {disk.f_bavail * disk.f_frsize / sizing.GB:.3f} GB, reserve: "
            f"{limits['reserve'] / sizing.GB:.3f} GB), so little or nothing is stored: make room, or "
            "kvp-admin cleanup --dead"
        )
    if text is not None and limits["budget"]:
        # The server counts for itself: here nothing is read again.
        shown = {(match[1], match[2]): float(match[3]) for match in _SAMPLE.finditer(text)}
        others = sum(size for (name, kind), size in shown.items() if name == "kvp_disk_bytes" and kind != "live")
        if others > limits["budget"] * FULL_SHARE:
            problems.append(
                f"what is not of this model takes {others / sizing.GB:.3f} GB of the budget of "
                f"{limits['budget'] / sizing.GB:.3f} GB, so nothing is stored: kvp-admin report, "
                "kvp-admin cleanup --dead"
            )
    return problems


def status(arguments: argparse.Namespace) -> int:
    """Is vLLM served from the cache, and if not, why not."""
    variables = _variables(arguments.config_dir, "identity.env")
    vllm, gate_state = state.read("vllm", arguments.run_dir), state.read("gate", arguments.run_dir)
    units = _unit_states()
    problems: List[str] = []
    if not variables.get("KVP_NAMESPACE"):
        problems.append(f"serving uncached on purpose: {variables.get('KVP_UNCACHED_REASON', '')}")
    elif vllm is None:
        problems.append("vLLM was never started")
    elif not vllm.get("caching"):
        problems.append(f"vLLM serves uncached: {vllm.get('reason')}. Repair that, then restart kvpersist-vllm")
    if gate_state is None:
        problems.append("the gate never ran: systemctl start kvpersist-gate")
    elif gate_state["gate"] == "refused":
        problems += [f"the gate refuses: {gate_state['reason']}", *gate_state["differences"]]
        problems.append(
            "stop the vLLM that differs (or correct the pins and run site.yml), then start kvpersist-lmcache"
        )
    elif gate_state["gate"] == "closed" and variables.get("KVP_NAMESPACE"):
        problems.append(f"the gate is closed: {gate_state['reason']}")
    problems += [f"{unit} is {shown}: journalctl -u {unit} -n 40" for unit, shown in units.items() if shown != "active"]
    problems += _store_problems(arguments, units[UNITS[0]] == "active")
    document: Dict[str, Any] = {
        "caching": not problems,
        "namespace": variables.get("KVP_NAMESPACE") or None,
        "model": variables.get("KVP_MODEL"),
        "vllm": vllm,
        "gate": gate_state,
        "units": units,
        "problems": problems,
    }
    if arguments.json:
        print(json.dumps(document))
    else:
        print("cached" if not problems else "UNCACHED")
        print(f"namespace  {document['namespace'] or '-'}")
        for name, shown in (("vllm", vllm), ("gate", gate_state)):
            if shown is not None:
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(shown["since"]))
                value = shown.get("gate") or ("cached" if shown.get("caching") else "uncached")
                print(f"{name:<10} {value} since {since}")
        for problem in problems:
            print(f"problem    {problem}")
    return 1 if problems else 0


def _memory_bytes() -> Optional[int]:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _disk_bytes(path: str) -> Optional[int]:
    try:
        shown = os.statvfs(path)
    except OSError:
        return None
    return shown.f_blocks * shown.f_frsize


def plan(arguments: argparse.Namespace) -> int:
    """What tokens cost on this host, and how many fit."""
    found = _identity(arguments)
    cache = {} if arguments.fields else _variables(arguments.config_dir, "cache.env")
    l1 = arguments.l1 if arguments.l1 is not None else float(cache.get("KVP_L1_SIZE_GB", 64))
    l2 = arguments.budget if arguments.budget is not None else float(cache.get("KVP_L2_SIZE_GB", 1500))
    planned = sizing.plan(found, l1, l2)
    root = cache.get("KVP_CACHE_ROOT")
    length = int(dict(found.items)["max_model_len"])
    warnings = sizing.warnings(planned, l1, l2, _memory_bytes(), _disk_bytes(root) if root else None, length)
    document = {**planned, "l1_gib": l1, "l2_gb": l2, "warnings": warnings}
    if arguments.tokens is not None:
        chunks = -(-arguments.tokens // planned["chunk_tokens"])
        document["tokens"] = arguments.tokens
        document["tokens_bytes"] = chunks * planned["chunk_tokens"] * planned["token_bytes"]
        document["tokens_files"] = chunks * planned["files_per_chunk"]
    if arguments.json:
        print(json.dumps(document))
        return 0
    for group in planned["kv_groups"]:
        shape = "MLA" if group["mla"] else f"{group['kv_heads']} KV heads"
        window = f", window {group['window']}" if group["window"] else ""
        print(
            f"{group['layers']} layers, {shape}, K {group['k_head_dim']} V {group['v_head_dim']}{window}: "
            f"{group['token_bytes']} bytes per token and rank"
        )
    print(f"one token  {planned['token_bytes']} bytes over all ranks, {planned['token_bytes_per_rank']} on one")
    print(
        f"one chunk  {planned['chunk_tokens']} tokens, {planned['files_per_chunk']} file(s) of "
        f"{planned['chunk_file_bytes']} bytes"
    )
    print(f"L1         {l1:g} GiB hold {planned['l1_tokens']} tokens")
    print(f"disk       {l2:g} GB (10^9 bytes) hold {planned['l2_tokens']} tokens")
    if arguments.tokens is not None:
        gigabytes = document["tokens_bytes"] / sizing.GB
        print(f"{arguments.tokens} tokens take {gigabytes:.3f} GB in {document['tokens_files']} files")
    for warning in warnings:
        print(f"warning    {warning}")
    return 0


def _setting(arguments: argparse.Namespace, name: str) -> str:
    """A variable of cache.env. Raises ValueError without it."""
    value = _variables(arguments.config_dir, "cache.env").get(name)
    if not value:
        raise ValueError(f"{os.path.join(arguments.config_dir, 'cache.env')} has no {name}: run site.yml")
    return value


def _root(arguments: argparse.Namespace) -> str:
    root = arguments.root or _setting(arguments, "KVP_CACHE_ROOT")
    if not os.path.isdir(root):
        raise ValueError(f"{root} is no directory: is the cache's disk mounted?")
    return str(root)


def _is_own(arguments: argparse.Namespace, root: str) -> bool:
    """Whether that is the cache root of this host."""
    own = _variables(arguments.config_dir, "cache.env").get("KVP_CACHE_ROOT")
    return own is not None and os.path.realpath(own) == os.path.realpath(root)


def _live(arguments: argparse.Namespace) -> List[str]:
    """The model names that are not dead: what this host serves."""
    variables = _variables(arguments.config_dir, "identity.env")
    return [variables["KVP_MODEL"]] if variables.get("KVP_NAMESPACE") else []


def _limits(arguments: argparse.Namespace) -> Dict[str, Any]:
    """Budget and reserve of this host in bytes."""
    budget = _variables(arguments.config_dir, "cache.env").get("KVP_L2_SIZE_GB")
    try:
        adapter = json.loads(_variables(arguments.config_dir, "lmcache-server.env")["KVP_L2_ADAPTER"])
        reserve = int(adapter["adapter_params"]["reserve_bytes"])
    except (ValueError, KeyError, TypeError):  # no server yet, or the stock adapter, which keeps nothing free
        reserve = 0
    return {
        "budget": int(float(budget) * sizing.GB) if budget else None,
        "reserve": reserve,
    }


_HITS = re.compile(r'lmcache_mp_lookup_hit_tokens_total\{(?:.*,)?model_name="((?:[^"\\]|\\.)*)".*\} ([0-9.e+]+)')


def _metrics(config_dir: str) -> Optional[str]:
    """What the running lmcache server's ``/metrics`` says; None when it does not answer."""
    # Only here: these two are most of the time that kvp-admin takes to start.
    import http.client
    import urllib.request

    try:
        with open(os.path.join(config_dir, "gate.json"), encoding="utf-8") as file:
            url = json.load(file)["lmcache_url"]
        # The loopback address needs no proxy, whatever the environment says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{url}/metrics", timeout=5) as response:
            return str(response.read().decode("utf-8", "replace"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
        return None


def _served(text: Optional[str]) -> Optional[Dict[str, int]]:
    """Tokens that the running lmcache server took from the cache, by model name; None when it does not tell."""
    if text is None or "lmcache_mp_" not in text:
        return None
    served: Counter[str] = Counter()
    for line in text.splitlines():
        match = _HITS.fullmatch(line)
        if match is not None:  # one for each salt
            served[match[1].replace("/", "--")] += int(float(match[2]))
    return dict(served)


def _age(seconds: int) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _shown(text: str) -> str:
    """The text on one line of printable characters."""
    return text if text.isprintable() else repr(text)


def report(arguments: argparse.Namespace) -> int:
    """What the cache holds, by namespace: bytes, objects, tokens, complete and incomplete sets, age, live or dead,
    and what shared prefixes saved (a chunk is kept once, however many requests share it)."""
    limits: Dict[str, Any] = {}  # unknown for another root than this host's
    if not arguments.root:
        limits = {**_limits(arguments), "served": _served(_metrics(arguments.config_dir))}
    shown = retention.report(_root(arguments), _live(arguments), **limits)
    if arguments.json:
        print(json.dumps(shown))
        return 0
    if arguments.prometheus:
        print(retention.prometheus(shown), end="")
        return 0
    for name, row in sorted(shown["namespaces"].items(), key=lambda each: (not each[1]["live"], -each[1]["bytes"])):
        tokens = "? tokens" if row["tokens"] is None else f"{row['tokens']} tokens"
        print(f"{'live' if row['live'] else 'DEAD'}  {_shown(name)}")
        print(
            f"      {row['bytes'] / sizing.GB:.3f} GB, {row['objects']} files, {row['complete_sets']} complete sets "
            f"({tokens}), {row['incomplete_sets']} incomplete, last used {_age(row['newest_seconds'])} ago, "
            f"oldest {_age(row['oldest_seconds'])}"
        )
        if row["live"] and row["served_tokens"] is None:
            print("      shared prefixes: unknown, the server does not tell what it served")
        elif row["live"]:
            saved = "? GB" if row["saved_bytes"] is None else f"{row['saved_bytes'] / sizing.GB:.3f} GB"
            print(
                f"      shared prefixes: {row['served_tokens']} tokens served from the cache since the server started; "
                f"a copy for each request would have taken {saved}"
            )
    sizes = ", ".join(f"{name} {size / sizing.GB:.3f} GB" for name, size in shown["bytes"].items())
    print(f"root  {shown['root']}: {sizes}; the disk has {shown['disk_free_bytes'] / sizing.GB:.3f} GB free")
    for warning in shown["warnings"]:
        print(f"warning  {warning}")
    return 0


def _model(root: str, text: str) -> str:
    """The model name that --namespace means, whole or as ``kvp-...``. Raises ValueError for one that is not there."""
    known: Set[str] = retention.namespaces(root)
    wanted = base_model(text)
    named = [name for name in known if name == wanted or name.endswith(f"-{wanted}")]
    if len(named) == 1:
        return named[0]
    # A whole namespace is no slip: its chunks are gone, or were never there.
    if not named and re.fullmatch(r"(.+-)?kvp-[0-9a-f]{32}", wanted):
        return wanted
    allowed = ", ".join(map(_shown, sorted(known))) or "nothing, the cache is empty"
    raise ValueError(f"--namespace is {text}; allowed: {allowed}")


def _crc32c() -> Crc:
    """CRC-32C of the package crc32c. Raises ValueError where this Python lacks it."""
    try:
        # Imported here alone: everything else has to run without it.
        function: Crc = importlib.import_module("crc32c").crc32c
        return function
    except ImportError:
        raise ValueError(
            f"verify needs the package crc32c, which {sys.executable} lacks: {PYTHON} has it, and kvp-admin runs on "
            "that once LMCache is installed (site.yml --tags lmcache)"
        ) from None


def verify(arguments: argparse.Namespace) -> int:
    """Read every chunk and check its frame: key, length and checksum. It only reads: the server moves a damaged
    chunk aside when it reads it itself, and `cleanup --corrupt` removes what was moved aside."""
    crc32c, root = _crc32c(), _root(arguments)
    wanted = {_model(root, text) for text in arguments.namespace} or None
    rate = None if arguments.rate is None else arguments.rate * 10**6
    counts, size = dict.fromkeys(retention.VERDICTS, 0), 0
    bad: Dict[str, List[Dict[str, str]]] = {retention.DAMAGED: [], retention.UNREADABLE: []}
    for file in retention.verify(root, crc32c, wanted, rate):
        counts[file.verdict] += 1
        if file.verdict not in (retention.RAW, retention.GONE):
            size += file.size
        if file.verdict in bad and arguments.json:
            bad[file.verdict].append({"name": retention.as_text(file.name), "why": file.why})
        elif file.verdict in bad:
            print(f"{file.verdict:<10} {_shown(file.name)}: {_shown(file.why)}", flush=True)
    if arguments.json:
        print(json.dumps({"root": root, "files": counts, "bytes": size, **bad}))
    else:
        rare = {
            retention.OTHER_RELEASE: "of another release (kept)",
            retention.RAW: "cannot be checked (no frame: the stock adapter wrote them)",
            retention.GONE: "gone meanwhile",
        }
        rest = "".join(f", {counts[verdict]} {text}" for verdict, text in rare.items() if counts[verdict])
        print(
            f"{counts['ok']} files are intact, {counts['damaged']} damaged, {counts['unreadable']} unreadable{rest}; "
            f"{size / sizing.GB:.3f} GB read"
        )
    return 1 if counts["damaged"] or counts["unreadable"] else 0


def cleanup(arguments: argparse.Namespace) -> int:
    """List the files that the selections name, least recently used first, and their bytes; --apply removes them."""
    root, live = _root(arguments), _live(arguments)
    if arguments.dead and arguments.root and not _is_own(arguments, root):
        raise ValueError(
            f"--dead is given with --root {root}, which is not this host's cache: what is live there is not known; "
            "allowed: --namespace, for each that may go"
        )
    if arguments.dead and not live:
        raise ValueError(
            "--dead is given, but this host serves uncached: no namespace is live, and which ones it will serve "
            "again is not known; allowed: --namespace, for each that may go"
        )
    budget = arguments.to_budget
    if budget is not None and budget < 0:
        budget = float(_setting(arguments, "KVP_L2_SIZE_GB"))
    chosen = retention.removable(
        root,
        live,
        dead=arguments.dead,
        namespace=_model(root, arguments.namespace) if arguments.namespace else "",
        older_than_seconds=arguments.older_than,
        temp=arguments.temp,
        corrupt=arguments.corrupt,
        to_budget=None if budget is None else int(budget * sizing.GB),
    )
    kept: List[Any] = []
    if arguments.apply:
        chosen, kept = retention.remove(root, chosen)
    total = sum(file.size for file in chosen)
    if arguments.json:
        listed = [{"name": retention.as_text(file.name), "bytes": file.size} for file in chosen]
        left = [{"name": retention.as_text(file.name), "why": why} for file, why in kept]
        print(json.dumps({"applied": arguments.apply, "files": listed, "bytes": total, "kept": left}))
    else:
        for file in chosen:
            print(f"{file.size:>14} {_shown(file.name)}")
        done = "removed" if arguments.apply else "would be removed (nothing was; add --apply)"
        print(f"{len(chosen)} files, {total / sizing.GB:.3f} GB {done}")
        for file, why in kept:
            print(f"kept: {_shown(file.name)}: {why}", file=sys.stderr)
    return 1 if kept else 0


def _duration(text: str) -> float:
    match = re.fullmatch(r"([0-9]+)(s|m|h|d|w)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is no time such as 30d, 12h, 90m")
    return float(int(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]])


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


COMMANDS = {
    "status": status,
    "identity": identity,
    "plan": plan,
    "report": report,
    "verify": verify,
    "cleanup": cleanup,
}


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="kvp-admin", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root.add_argument("--config-dir", default=state.CONFIG_DIR, help="where the env files are (%(default)s)")
    root.add_argument("--run-dir", default=state.RUN_DIR, help="where the services write their state (%(default)s)")
    commands = root.add_subparsers(dest="command", required=True)
    codes = (__doc__ or "").rpartition("\n\n")[2]
    for name, function in COMMANDS.items():
        text = " ".join((function.__doc__ or "").split())
        command = commands.add_parser(name, help=text, description=text, epilog=codes)
        form = command.add_mutually_exclusive_group()
        form.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "report":
            form.add_argument("--prometheus", action="store_true", help="print gauges in Prometheus' text format")
        command.set_defaults(function=function)
        if name in ("identity", "plan"):
            command.add_argument(
                "--fields",
                metavar="FILE",
                help="JSON object of the fields (- for standard input) instead of this host's",
            )
    commands.choices["plan"].add_argument(
        "--tokens", type=lambda text: int(_positive(text)), help="what this many tokens take"
    )
    commands.choices["plan"].add_argument(
        "--budget", type=_positive, metavar="GB", help="disk budget in GB of 10^9 bytes (this host's)"
    )
    commands.choices["plan"].add_argument(
        "--l1", type=_positive, metavar="GIB", help="memory buffer in GiB (this host's)"
    )
    for name in ("report", "verify", "cleanup"):
        commands.choices[name].add_argument("--root", metavar="DIR", help="another cache root (this host's)")
    check = commands.choices["verify"]
    check.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NS",
        help="only the chunks of this namespace, by kvp-... or its whole name; may be repeated",
    )
    check.add_argument(
        "--rate", type=_positive, metavar="MB_PER_S", help="read at most so many MB of 10^6 bytes in a second"
    )
    clean = commands.choices["cleanup"]
    clean.add_argument("--apply", action="store_true", help="remove them; without it they are listed")
    clean.add_argument("--dead", action="store_true", help="chunks of namespaces that this host does not serve")
    clean.add_argument("--namespace", default="", metavar="NS", help="chunks of this namespace, by kvp-... or its name")
    clean.add_argument("--older-than", type=_duration, metavar="TIME", help="only what was not used for 30d, 12h, 90m")
    clean.add_argument("--temp", action="store_true", help="unfinished writes that nothing touched for an hour")
    clean.add_argument("--corrupt", action="store_true", help="damaged files that were moved aside")
    clean.add_argument(
        "--to-budget",
        type=_positive,
        nargs="?",
        const=-1.0,
        metavar="GB",
        help="least recently used chunks until the root takes so many GB of 10^9 bytes (this host's), dead first",
    )
    return root


def main(words: Optional[List[str]] = None) -> int:
    arguments = parser().parse_args(words)
    try:
        return int(arguments.function(arguments))
    except (ValueError, OSError, RecursionError) as error:
        print(f"kvp-admin: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
