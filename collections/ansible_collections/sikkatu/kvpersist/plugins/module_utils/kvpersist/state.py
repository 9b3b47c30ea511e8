"""What the running services say of themselves: JSON for people and tools, text for Prometheus.

The launcher and the gate write here when something changes; nothing polls.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Dict, List, Mapping, Optional

CONFIG_DIR = "/etc/kvpersist"
RUN_DIR = "/run/kvpersist"
#: For node exporter's textfile collector.
METRICS_FILE = "kvpersist.prom"

_KEYS: Mapping[str, Mapping[str, type]] = {
    "vllm": {"caching": bool, "reason": str},
    "gate": {"gate": str, "reason": str, "differences": list, "model": str},
}


def read(name: str, run_dir: str = RUN_DIR) -> Optional[Dict[str, Any]]:
    """The state of ``vllm`` or ``gate``; None where there is none yet, or none that was written here."""
    try:
        with open(os.path.join(run_dir, f"{name}.json"), encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("since"), int):
        return None
    return document if all(isinstance(document.get(key), kind) for key, kind in _KEYS[name].items()) else None


def write(name: str, document: Dict[str, Any], run_dir: str = RUN_DIR) -> None:
    """Replace the state of ``vllm`` or ``gate``, stamped with the time (seconds since 1970), and the metrics."""
    _replace(os.path.join(run_dir, f"{name}.json"), json.dumps({**document, "since": int(time.time())}) + "\n")
    _replace(os.path.join(run_dir, METRICS_FILE), metrics(read("vllm", run_dir), read("gate", run_dir)))


def note_refusal(invocation: str, differences: List[str], run_dir: str = RUN_DIR) -> None:
    """The gate refused while that start of kvpersist-vllm was running (systemd's InvocationID)."""
    document = {"invocation": invocation, "differences": differences}
    _replace(os.path.join(run_dir, "refused.json"), json.dumps(document) + "\n")


def refusal(invocation: str, run_dir: str = RUN_DIR) -> Optional[str]:
    """Why the gate refused that start of kvpersist-vllm; None when it did not."""
    try:
        with open(os.path.join(run_dir, "refused.json"), encoding="utf-8") as file:
            document = json.load(file)
        if invocation and document["invocation"] == invocation:
            return "; ".join(map(str, document["differences"])) or "it could not judge"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def metrics(vllm: Optional[Dict[str, Any]], gate: Optional[Dict[str, Any]]) -> str:
    """Both states in Prometheus' text format."""
    lines = []

    def gauge(name: str, text: str, value: int, labels: str = "") -> None:
        lines.extend([f"# HELP {name} {text}", f"# TYPE {name} gauge", f"{name}{labels} {value}"])

    if vllm is not None:
        uncached = not vllm.get("caching")
        gauge("kvp_serving_uncached", "1 when vLLM was started without the cache.", int(uncached))
        gauge(
            "kvp_serving_uncached_since_seconds",
            "Unix time since when vLLM serves without the cache, 0 when it has it.",
            int(vllm.get("since", 0)) if uncached else 0,
        )
    if gate is not None:
        gauge(
            "kvp_gate_open", "1 when the registered vLLM is the one that was pinned.", int(gate.get("gate") == "open")
        )
        gauge(
            "kvp_gate_refused",
            "1 when the cache is kept off a vLLM that disagrees with the pins.",
            int(gate.get("gate") == "refused"),
        )
        gauge("kvp_gate_changed_seconds", "Unix time of the gate's last change.", int(gate.get("since", 0)))
    return "".join(line + "\n" for line in lines)


def _replace(path: str, text: str) -> None:
    part = f"{path}.{os.getpid()}.part"
    with open(part, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(part, 0o644)
    os.replace(part, path)
