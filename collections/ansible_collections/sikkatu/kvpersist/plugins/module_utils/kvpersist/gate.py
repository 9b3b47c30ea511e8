"""The gate: is the vLLM that registered with the lmcache server the one that was pinned?

LMCache's ``/status`` shows what each vLLM really registered. Until a registration under the
pinned name agrees with the pins the gate is closed; when one disagrees, caching is taken
off it. Serving goes on either way.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Sequence, Set

from . import render, sizing, state
from .identity import CacheIdentity, fields_from_env

UNIT = "kvpersist-lmcache.service"
VLLM_UNIT = "kvpersist-vllm.service"

#: LMCache writes some lines to its log for each look at ``/status``, so it is looked at once a
#: second only for a while after a connection to it came or went, and rarely otherwise.
TICK_SECONDS = 0.5
LOOK_SECONDS = 1.0
AWAKE_SECONDS = 60.0
ASLEEP_SECONDS = 60.0
#: Looks in a row that a server may leave unanswered while vLLM is connected to it (about an hour).
UNANSWERED_LOOKS = 120

#: What a disk that is gone or read-only says. It tells nothing about the vLLM that registered.
DISK_FAULTS = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EUCLEAN)

#: dtypes under which a KV cache of fp8 registers: vLLM keeps its bytes in uint8.
_TORCH_DTYPES = {
    "fp8_e4m3": ("torch.uint8", "torch.float8_e4m3fn"),
    "fp8_e5m2": ("torch.uint8", "torch.float8_e5m2"),
}


def registrations(status: Mapping[str, Any], model_name: str) -> List[Mapping[str, Any]]:
    """What registered under the pinned name, or under what LMCache derives from it.

    With an interleaved layout of decode context parallelism LMCache appends ``##...``
    (``get_dcp_decorated_model_name``).
    """
    contexts = status.get("cache_context_meta")
    contexts = contexts.values() if isinstance(contexts, Mapping) else []
    return [
        context
        for context in contexts
        if isinstance(context, Mapping) and str(context.get("model_name")).split("##")[0] == model_name
    ]


def layout(context: Mapping[str, Any]) -> Dict[str, Any]:
    """The part of a registration that stays the same from start to start."""
    shown = context["kv_cache_layout"]
    keys = (
        "object_group_idx",
        "num_layers",
        "tokens_per_block",
        "slots_per_block",
        "dtype",
        "is_mla",
        "engine_kv_format",
    )
    return {
        "world_size": context["world_size"],
        "num_layers": shown["num_layers"],
        "cache_size_per_token": shown["cache_size_per_token"],
        "kernel_groups": [{key: group[key] for key in keys} for group in shown["kernel_groups"]],
    }


def differences(identity: CacheIdentity, status: Mapping[str, Any]) -> List[str]:
    """Fields in which the registrations and the server disagree with the pins.

    Each entry is ``field: registered X, pinned Y``. Empty when all agree. Anything that the
    server does not tell counts as a disagreement.
    """
    pins = dict(identity.items)
    name = identity.lmcache_model_name()
    found: List[str] = []

    def expect(field: str, registered: object, *pinned: object) -> None:
        if registered not in pinned:
            found.append(f"{field}: registered {registered}, pinned {' or '.join(map(str, pinned))}")

    expect("chunk_size", status.get("chunk_size"), pins["chunk_size"])
    expect("hash_algorithm", status.get("hash_algorithm"), pins["hash_algorithm"])
    stages, shares = pins["pipeline_parallel_size"], pins["decode_context_parallel_size"]
    for context in registrations(status, name):
        try:
            seen = layout(context)
        except (KeyError, TypeError) as error:
            found.append(f"status: the lmcache server does not tell {error}")
            continue
        if not seen["kernel_groups"]:
            found.append("status: the lmcache server tells no kernel groups")
        expect("model_name", context["model_name"], name)
        expect("world_size", seen["world_size"], sizing.kv_pieces(identity) * stages)
        for group in seen["kernel_groups"]:
            expect("block_size", group["tokens_per_block"], pins["block_size"] * shares)
            dtype = pins["kv_cache_dtype"]
            expect("kv_cache_dtype", group["dtype"], *_TORCH_DTYPES.get(dtype, (f"torch.{dtype}",)))
        if stages == 1:
            expect("kv_groups (layers)", seen["num_layers"], sum(group["layers"] for group in pins["kv_groups"]))
            bytes_per_token = sizing.plan(identity, 1, 1)["token_bytes_per_rank"]
            if shares == 1:
                expect("kv_groups (bytes per token)", seen["cache_size_per_token"], bytes_per_token)
    return sorted(set(found))


def manifest(identity: CacheIdentity, status: Mapping[str, Any]) -> Dict[str, Any]:
    """What stands in ``<namespace>.json`` beside the cache files: what passed the gate."""
    contexts = registrations(status, identity.lmcache_model_name())
    layouts = {json.dumps(layout(context), sort_keys=True) for context in contexts}
    return {
        "namespace": identity.namespace(),
        "model": identity.lmcache_model_name(),
        "identity": json.loads(identity.canonical_json()),
        "registered": [json.loads(seen) for seen in sorted(layouts)],
    }


def check_manifest(path: str, wanted: Dict[str, Any]) -> List[str]:
    """Compare with the manifest of earlier starts, or write the first one.

    Entries are ``field: registered X, recorded Y``. A manifest that cannot be read is a
    disagreement, not a reason to write another. Raises OSError when the first cannot be written, or the disk fails.
    """
    try:
        with open(path, encoding="utf-8") as file:
            recorded = json.load(file)
    except FileNotFoundError:
        owner = os.stat(os.path.dirname(path))
        part = f"{path}.part"
        with open(part, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            json.dump(wanted, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        return []
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FAULTS:
            raise
        return [f"manifest: {path} cannot be read ({error})"]
    if not isinstance(recorded, dict):
        return [f"manifest: {path} is no manifest"]
    return [
        f"manifest ({key}): now {json.dumps(wanted[key])}, recorded {json.dumps(recorded.get(key))}. If that is meant "
        f"to be (another GPU or attention backend), remove {path} and the cache files of that namespace"
        for key in wanted
        if wanted[key] != recorded.get(key)
    ]


class Gate:
    """One look after another at the lmcache server; the state changes only with what is seen."""

    def __init__(self, config_dir: str = state.CONFIG_DIR, run_dir: str = state.RUN_DIR) -> None:
        self.config_dir = config_dir
        self.run_dir = run_dir
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.seen: FrozenSet[str] = frozenset()
        self.judged: Optional[FrozenSet[str]] = None
        self.unanswered = 0
        self.shown = state.read("gate", run_dir)
        if self.shown is not None:
            self.shown.pop("since", None)

    def status(self, url: str) -> Optional[Mapping[str, Any]]:
        """LMCache's ``/status``, None when it does not answer."""
        try:
            with self.opener.open(f"{url}/status", timeout=5) as response:
                document = json.load(response)
        except (OSError, ValueError, http.client.HTTPException):
            return None
        return document if isinstance(document, Mapping) else None

    def look(self) -> Dict[str, Any]:
        """``{"gate": "open" | "closed" | "refused", "reason": ..., "differences": [...], "model": ...}``.

        Closed means that nothing is registered under the pinned name. What cannot be judged is refused.
        ``model`` is the name that an open gate admits.
        """
        try:
            return self._look()
        except Exception as error:  # whatever it was, nobody has seen that the registration is right
            return _state("refused", "the gate could not judge", [f"{type(error).__name__}: {error}"])

    def _look(self) -> Dict[str, Any]:
        with open(os.path.join(self.config_dir, "gate.json"), encoding="utf-8") as file:
            config = json.load(file)
        try:
            with open(os.path.join(self.config_dir, "identity.env"), encoding="utf-8") as file:
                variables = render.read_env_file(file.read())
        except FileNotFoundError:
            return _state("closed", "there are no pins: run site.yml")
        if not variables.get("KVP_NAMESPACE"):
            return _state("closed", variables.get("KVP_UNCACHED_REASON") or "there is no namespace: serving uncached")
        identity = CacheIdentity.from_fields(fields_from_env(variables))
        if variables["KVP_NAMESPACE"] != identity.namespace():
            return _state("refused", "identity.env was edited", ["namespace: not that of the fields beside it"])
        status = self.status(config["lmcache_url"])
        if status is None:
            return self._unanswered()
        self.unanswered, self.judged = 0, self.seen
        pins, seen = dict(identity.items), registrations(status, identity.lmcache_model_name())
        if not seen:
            return _state("closed", f"no vLLM is registered as {identity.lmcache_model_name()}")
        found = differences(identity, status)
        ranks = pins["tensor_parallel_size"] * pins["pipeline_parallel_size"]
        if not found and len(seen) < ranks:
            return _state("closed", f"{len(seen)} of {ranks} ranks are registered")
        if not found:
            path = os.path.join(config["cache_root"], f"{identity.namespace()}.json")
            try:
                found = check_manifest(path, manifest(identity, status))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return _state("closed", "the disk is full: the manifest cannot be written (kvp-admin status)")
                if error.errno in DISK_FAULTS:
                    return _state("closed", f"the cache's disk fails: {error.strerror} (kvp-admin status)")
                raise
        if found:
            return _state("refused", "the registered vLLM is not the one that was pinned", found)
        return _state("open", "", model=identity.lmcache_model_name())

    def _unanswered(self) -> Dict[str, Any]:
        """A refusal stands while the server is down: it is why. One that hangs while vLLM talks to it is one too.

        A server that is too busy to answer changes nothing, as long as the same vLLM is connected.
        """
        # A server that starts takes connections before it answers: only a long silence counts.
        self.unanswered = self.unanswered + 1 if self.seen else 0
        if self.shown is not None and self.shown["gate"] == "refused":
            return self.shown
        if self.unanswered >= UNANSWERED_LOOKS:
            return _state("refused", "vLLM is connected to an lmcache server that does not answer the gate")
        if self.shown is not None and self.shown["gate"] == "open" and self.seen and self.seen == self.judged:
            return self.shown
        return _state("closed", "the lmcache server does not answer")

    def step(self, seen_connections: FrozenSet[str] = frozenset()) -> None:
        """One look; the far ends of the connections to the server say who talks to it."""
        self.seen = seen_connections
        seen = self.look()
        if seen["gate"] == "refused" and seen is not self.shown:
            # The stock adapter knows no gate: only a stopped server serves and stores nothing. A vLLM
            # that is still starting may end without it; then the launcher finds the refusal.
            state.note_refusal(_invocation(), seen["differences"], self.run_dir)
            subprocess.run(["systemctl", "stop", "--no-block", UNIT], check=False)
        if seen != self.shown:
            if seen["gate"] == "open":  # whatever was refused before, this vLLM is the pinned one
                state.note_refusal("", [], self.run_dir)
            self.shown = seen
            state.write("gate", seen, self.run_dir)
            text = "; ".join([seen["reason"], *seen["differences"]]).strip("; ")
            print(f"kvpersist: gate {seen['gate']}{': ' + text if text else ''}", flush=True)


def _invocation() -> str:
    """Which start of kvpersist-vllm is running now; empty when none is."""
    command = ["systemctl", "show", "--property", "ActiveState,InvocationID", VLLM_UNIT]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    shown = dict(line.split("=", 1) for line in run.stdout.splitlines() if "=" in line)
    return shown.get("InvocationID", "") if shown.get("ActiveState") in ("active", "activating", "reloading") else ""


def _state(gate: str, reason: str, found: Optional[List[str]] = None, model: str = "") -> Dict[str, Any]:
    return {"gate": gate, "reason": reason, "differences": found or [], "model": model}


def connections(port: int, tables: Sequence[str] = ("/proc/net/tcp", "/proc/net/tcp6")) -> FrozenSet[str]:
    """Far ends of the established connections to a local port, as the kernel's tables spell them."""
    found: Set[str] = set()
    for table in tables:
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        # sl, local address, remote address, state: 01 is ESTABLISHED.
        found.update(row[2] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01")
    return frozenset(found)


class Pace:
    """When to look: after every change of the connections for a while, else rarely. Times are seconds."""

    def __init__(self) -> None:
        self.seen: Optional[FrozenSet[str]] = None
        self.awake_until = 0.0
        self.next_look = 0.0

    def due(self, now: float, seen: FrozenSet[str]) -> bool:
        if seen != self.seen:
            self.seen = seen
            self.awake_until = now + AWAKE_SECONDS
            self.next_look = min(self.next_look, now)
        if now < self.next_look:
            return False
        self.next_look = now + (LOOK_SECONDS if now < self.awake_until else ASLEEP_SECONDS)
        return True


def main(words: Sequence[str]) -> None:
    """Watch for ever (kvpersist-gate.service); with ``stopped``, note that nobody watches any more."""
    if list(words) == ["stopped"]:
        if (state.read("gate", state.RUN_DIR) or {}).get("gate") == "refused":
            return
        state.write("gate", _state("closed", "the gate does not run: systemctl start kvpersist-gate"), state.RUN_DIR)
        return
    gate, pace = Gate(), Pace()
    with open(os.path.join(gate.config_dir, "gate.json"), encoding="utf-8") as file:
        port = int(json.load(file)["lmcache_port"])
    while True:
        seen = connections(port)
        if pace.due(time.monotonic(), seen):
            gate.step(seen)
        time.sleep(TICK_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1:])
