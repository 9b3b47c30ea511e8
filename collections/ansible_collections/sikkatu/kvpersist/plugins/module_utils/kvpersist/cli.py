"""kvp-admin: look at the cache of this VM, and clean it up. It never runs by itself, and without
--apply it only reads.

Exit codes: 0 as asked; 1 something is not as it should be (the output says what); 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

from . import gate, render, retention, sizing, state
from .identity import CacheIdentity, fields_from_env

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
    problems += [f"{unit} is {shown}" for unit, shown in units.items() if shown != "active"]
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


def _root(arguments: argparse.Namespace) -> str:
    root = arguments.root or _variables(arguments.config_dir, "cache.env")["KVP_CACHE_ROOT"]
    if not os.path.isdir(root):
        raise ValueError(f"{root} is no directory: is the cache's disk mounted?")
    return str(root)


def _live(arguments: argparse.Namespace) -> List[str]:
    """The model names that are not dead: what this host serves."""
    variables = _variables(arguments.config_dir, "identity.env")
    return [variables["KVP_MODEL"]] if variables.get("KVP_NAMESPACE") else []


def _age(seconds: int) -> str:
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def report(arguments: argparse.Namespace) -> int:
    """What the cache holds, by namespace."""
    shown = retention.report(_root(arguments), _live(arguments))
    if arguments.json:
        print(json.dumps(shown))
        return 0
    for name, row in sorted(shown["namespaces"].items(), key=lambda each: (not each[1]["live"], -each[1]["bytes"])):
        tokens = "? tokens" if row["tokens"] is None else f"{row['tokens']} tokens"
        print(f"{'live' if row['live'] else 'DEAD'}  {name}")
        print(
            f"      {row['bytes'] / sizing.GB:.3f} GB, {row['objects']} files, {row['complete_sets']} complete sets "
            f"({tokens}), {row['incomplete_sets']} incomplete, last used {_age(row['newest_seconds'])} ago, "
            f"oldest {_age(row['oldest_seconds'])}"
        )
    sizes = ", ".join(f"{name} {size / sizing.GB:.3f} GB" for name, size in shown["bytes"].items())
    print(f"root  {shown['root']}: {sizes}; the disk has {shown['disk_free_bytes'] / sizing.GB:.3f} GB free")
    return 0


def cleanup(arguments: argparse.Namespace) -> int:
    """Remove chunks; without --apply only say which."""
    root, live = _root(arguments), _live(arguments)
    namespace = arguments.namespace
    if namespace:
        known = retention.report(root, live)["namespaces"]
        named = [name for name in known if name == namespace or name.endswith(f"-{namespace}")]
        if len(named) != 1:
            raise ValueError(
                f"--namespace is {namespace}; allowed: {', '.join(sorted(known)) or 'nothing, the cache is empty'}"
            )
        namespace = named[0]
    budget = arguments.to_budget
    if budget is not None and budget < 0:
        budget = float(_variables(arguments.config_dir, "cache.env")["KVP_L2_SIZE_GB"])
    chosen = retention.removable(
        root,
        live,
        dead=arguments.dead,
        namespace=namespace,
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
        listed = [{"name": file.name, "bytes": file.size} for file in chosen]
        left = [{"name": file.name, "why": why} for file, why in kept]
        print(json.dumps({"applied": arguments.apply, "files": listed, "bytes": total, "kept": left}))
    else:
        for file in chosen:
            print(f"{file.size:>14} {file.name}")
        done = "removed" if arguments.apply else "would be removed (nothing was; add --apply)"
        print(f"{len(chosen)} files, {total / sizing.GB:.3f} GB {done}")
        for file, why in kept:
            print(f"kept: {file.name}: {why}", file=sys.stderr)
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


COMMANDS = {"status": status, "identity": identity, "plan": plan, "report": report, "cleanup": cleanup}


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="kvp-admin", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root.add_argument("--config-dir", default=gate.CONFIG_DIR, help="where the env files are (%(default)s)")
    root.add_argument("--run-dir", default=state.RUN_DIR, help="where the services write their state (%(default)s)")
    commands = root.add_subparsers(dest="command", required=True)
    for name, function in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.add_argument("--json", action="store_true", help="print one JSON object")
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
    for name in ("report", "cleanup"):
        commands.choices[name].add_argument("--root", metavar="DIR", help="another cache root (this host's)")
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
