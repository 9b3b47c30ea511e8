"""One chat through the OpenAI API, with the evidence of where its prompt's KV came from.

The evidence is LMCache's own: its counters of tokens hit in memory (L1) and on disk (L2)
before and after the request. ``cached_tokens`` of the answer counts vLLM's prefix cache in
GPU memory too and so proves nothing alone. Meant for a server that nobody else talks to:
the counters are the server's, not the request's.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any, Dict, Iterator, List, Mapping, Optional

#: The loopback address needs no proxy, whatever the environment says.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

#: What urllib raises for a server that is away, silent or not an HTTP server.
_FAULTS = (OSError, ValueError, http.client.HTTPException)

_COUNTED = {
    "stored_chunks": "lmcache_mp_l2_store_completed_objects_chunks_total",
    "l1_tokens": "lmcache_mp_lookup_hit_l1_tokens_total",
    "l2_tokens": "lmcache_mp_lookup_hit_l2_tokens_total",
}


class ProbeError(RuntimeError):
    """The server could not be reached, refused the request or did not finish in time."""


def conversation(seed: int, tokens: int) -> List[Dict[str, str]]:
    """A long chat of about ``tokens`` tokens; another ``seed`` differs from its first words on."""

    def pick(turn: int, what: str, choices: List[str]) -> str:
        digest = hashlib.sha256(f"{seed}/{turn}/{what}".encode()).digest()
        return choices[int.from_bytes(digest[:4], "big") % len(choices)]

    colours = ["red", "grey", "black", "white", "green", "blue"]
    towns = ["Riga", "Porto", "Bergen", "Cork", "Izmir", "Genoa", "Malmo", "Gdansk"]
    goods = ["tea", "salt", "copper", "wool", "oranges", "paper", "timber", "glass"]
    messages: List[Dict[str, str]] = []
    for turn in range(max(1, tokens // 68)):
        colour, town, good = (pick(turn, "c", colours), pick(turn, "t", towns), pick(turn, "g", goods))
        crates = 10 + int(pick(turn, "n", [str(n) for n in range(90)]))
        messages.append(
            {
                "role": "user",
                "content": f"Logbook {seed}, day {turn + 1}: "
                f"a {colour} ship from {town} brought {crates} crates of {good}.",
            }
        )
        noted = f"Noted: {crates} crates of {good} from {town} on day {turn + 1}."
        messages.append({"role": "assistant", "content": noted})
    messages.append({"role": "user", "content": "Which ship came last, and what should the harbour master do next?"})
    return messages


def _open(url: str, timeout: float, body: Optional[bytes] = None, headers: Optional[Mapping[str, str]] = None) -> Any:
    request = urllib.request.Request(url, data=body, headers=dict(headers or {}))
    try:
        return _OPENER.open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        raise ProbeError(f"{url} says {error.code}: {error.read(500).decode('utf-8', 'replace')}") from error
    except _FAULTS as error:
        raise ProbeError(f"{url}: {error}") from error


def _read(url: str, timeout: float) -> bytes:
    try:
        with _open(url, timeout) as response:
            return bytes(response.read())
    except _FAULTS as error:
        raise ProbeError(f"{url}: {error!r}") from error


def counters(url: str, timeout: float = 5) -> Dict[str, float]:
    """Sum over all labels of each counter and gauge at a Prometheus endpoint. Raises ProbeError."""
    sums: Dict[str, float] = {}
    for line in _read(url, timeout).decode("utf-8", "replace").splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def settle(status_url: str, deadline: float) -> bool:
    """Wait until the server has nothing left to write to disk; False when time is up.

    ``deadline`` is a time.monotonic() value. Two quiet looks in a row: a store reaches the
    queue a moment after the answer.
    """
    quiet = 0
    while quiet < 2:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
        controllers = json.loads(_read(status_url, 5))["storage_manager"]["store_controllers"].values()
        busy = sum(c["pending_keys_count"] + c["in_flight_task_count"] for c in controllers)
        quiet = 0 if busy else quiet + 1
    return True


def _events(response: Any) -> Iterator[Dict[str, Any]]:
    for raw in response:
        line = raw.decode("utf-8").strip()
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[len("data: ") :])


def chat(
    url: str,
    model: str,
    messages: List[Dict[str, str]],
    api_key: str = "",
    max_tokens: int = 24,
    cache_salt: str = "",
    timeout: float = 600,
) -> Dict[str, Any]:
    """Send one chat at temperature 0 and stream the answer.

    Returns text, token_ids, prompt_tokens, cached_tokens, ttft_seconds (to the first token)
    and total_seconds. A ``cache_salt`` no one used before forces a full recompute. Raises
    ProbeError, also when the whole takes longer than ``timeout`` seconds.
    """
    body: Dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if cache_salt:
        body["cache_salt"] = cache_salt
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    start = time.monotonic()
    text, first = "", None
    token_ids: List[int] = []
    usage: Dict[str, Any] = {}
    try:
        with _open(f"{url}/v1/chat/completions", timeout, json.dumps(body).encode(), headers) as response:
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event.get("choices", []):
                    ids = choice.get("token_ids") or []
                    if ids and first is None:
                        first = time.monotonic()
                    text += choice["delta"].get("content") or ""
                    token_ids += ids
                if time.monotonic() - start > timeout:
                    raise ProbeError(f"{url}: the answer took longer than {timeout:.0f} s")
    except _FAULTS as error:
        raise ProbeError(f"{url}: the answer broke off: {error!r}") from error
    if first is None or not usage:
        raise ProbeError(f"{url}: the answer has no tokens or no usage")
    return {
        "text": text,
        "token_ids": token_ids,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        "ttft_seconds": round(first - start, 3),
        "total_seconds": round(time.monotonic() - start, 3),
    }


def probe(lmcache_url: str, settle_seconds: float = 60, **request: Any) -> Dict[str, Any]:
    """:func:`chat`, how many of its prompt tokens LMCache found in memory and on disk, and
    how many chunks it stored on disk.

    ``l1_tokens``, ``l2_tokens`` and ``stored_chunks`` are None when the lmcache server does
    not answer; a counter that starts anew (the server was restarted in between) counts from zero.
    ``settled`` says whether everything was on disk within ``settle_seconds``.
    """
    evidence: Dict[str, Any] = {**dict.fromkeys(_COUNTED), "settled": False}
    try:
        before: Optional[Dict[str, float]] = counters(f"{lmcache_url}/metrics")
    except ProbeError:
        before = None
    result = chat(**request)
    if before is not None:
        try:
            evidence["settled"] = settle(f"{lmcache_url}/status", time.monotonic() + settle_seconds)
            after = counters(f"{lmcache_url}/metrics")
        except ProbeError:
            return {**result, **evidence}
        for key, name in _COUNTED.items():
            old, new = before.get(name, 0.0), after.get(name, 0.0)
            evidence[key] = int(new - old if new >= old else new)
    return {**result, **evidence}
