"""kvp-admin: look at the cache of this VM. It only reads, and never runs by itself.

Exit codes: 0 as asked; 1 something is not as it should be (the output says what); 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

from . import gate, render, sizing, state
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


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="kvp-admin", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    root.add_argument("--config-dir", default=gate.CONFIG_DIR, help="where the env files are (%(default)s)")
    root.add_argument("--run-dir", default=state.RUN_DIR, help="where the services write their state (%(default)s)")
    commands = root.add_subparsers(dest="command", required=True)
    for name, function in (("status", status), ("identity", identity), ("plan", plan)):
        command = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(function=function)
        if function is not status:
            command.add_argument(
                "--fields",
                metavar="FILE",
                help="JSON object of the fields (- for standard input) instead of this host's",
            )
    command.add_argument("--tokens", type=lambda text: int(_positive(text)), help="what this many tokens take")
    command.add_argument("--budget", type=_positive, metavar="GB", help="disk budget in GB of 10^9 bytes (this host's)")
    command.add_argument("--l1", type=_positive, metavar="GIB", help="memory buffer in GiB (this host's)")
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
