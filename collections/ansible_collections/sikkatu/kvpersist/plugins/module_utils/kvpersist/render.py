"""Rendering of what the services read: env files, the L2 adapter JSON, the connector JSON."""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Mapping, Optional
from urllib.parse import urlsplit

from .objects import CODECS

GIB = 1024**3
GB = 10**9

CONNECTOR = "LMCacheMPConnector"
#: Without it vLLM takes its own, older connector of the same name.
CONNECTOR_MODULE_PATH = "lmcache.integration.vllm.lmcache_mp_connector"

#: The disk adapters that can be rendered; the first is the product's own.
L2_ADAPTERS = ("kvpersist", "nixl_store_dynamic")
#: What is flushed before a chunk counts as stored: nothing, its file, its directory entry too.
FSYNC = ("none", "file", "file+dir")
#: Where the gate says whether the store may be used; its plugin reads it.
GATE_FILE = "/run/kvpersist/gate.json"


def env_file(variables: Mapping[str, object]) -> str:
    """Lines ``NAME=value`` that systemd (EnvironmentFile) and a POSIX shell read alike.

    Lists and dictionaries become compact JSON. A value of plain characters stays bare;
    single quotes, or double quotes with ``\\ " $ ``` escaped, mean the same to both.
    Raises ValueError for a name or value that no such line can carry.
    """
    lines = []
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            raise ValueError(f"{name!r} is not the name of an environment variable: letters, digits and _ only")
        text = _plain(value)
        if re.search(r"[\x00-\x1f\x7f\x85\u2028\u2029]", text):
            raise ValueError(f"{name} is {json.dumps(text)}; allowed: one line without control characters")
        if not re.fullmatch(r"[A-Za-z0-9_./:@%+,=-]*", text):
            quoted = '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
            text = quoted if "'" in text else f"'{text}'"
        lines.append(f"{name}={text}")
    return "".join(line + "\n" for line in lines)


def read_env_file(text: str) -> Dict[str, str]:
    """The variables of a file that :func:`env_file` wrote. Raises ValueError for another line."""
    variables = {}
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, value = line.strip().partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{line!r} is no line NAME=value")
        quote = value[:1]
        if quote in ("'", '"'):
            if len(value) < 2 or not value.endswith(quote):
                raise ValueError(f"{line!r} has a quote that does not end")
            value = value[1:-1]
            if quote == '"':
                value = re.sub(r'\\(["\\$`])', r"\1", value)
        variables[name] = value
    return variables


def _plain(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, separators=(",", ":"))
    return str(value).lower() if isinstance(value, bool) else str(value)


#: Pins that are options of ``vllm serve``: what is hashed is what runs.
SERVE_OPTIONS: Mapping[str, str] = {
    "dtype": "--dtype",
    "quantization": "--quantization",
    "hf_overrides": "--hf-overrides",
    "kv_cache_dtype": "--kv-cache-dtype",
    "block_size": "--block-size",
    "max_model_len": "--max-model-len",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "decode_context_parallel_size": "--decode-context-parallel-size",
}


def serve_args(pins: Mapping[str, Any]) -> List[str]:
    """Arguments of ``vllm serve`` for the checked pins that are there.

    float32 is not among the choices of ``--kv-cache-dtype``: a float32 model has it by
    itself. An unquantised model and no overrides are what vLLM has without the option.
    """
    without = {"quantization": "none", "hf_overrides": {}, "kv_cache_dtype": "float32"}
    arguments = []
    for field, option in SERVE_OPTIONS.items():
        if field in pins and pins[field] != without.get(field):
            arguments += [option, _plain(pins[field])]
    return arguments


def l2_adapter(
    cache_root: str,
    l2_size_gb: float,
    adapter: str = "kvpersist",
    trigger_watermark: float = 0.9,
    eviction_ratio: float = 0.1,
    serde: str = "none",
    fsync: str = "file",
    reserve_gb: float = 0,
    quotas_gb: Optional[Mapping[str, float]] = None,
    direct_io: bool = False,
) -> str:
    """Value of ``lmcache server --l2-adapter``.

    Sizes are GB of 10^9 bytes: ``l2_size_gb`` the budget, ``reserve_gb`` what stays free on the
    disk, ``quotas_gb`` what a model name may take. ``serde`` is only checked: the plugin reads
    LMCACHE_L2_SERDE and KVP_MODEL, so that each stands in one place. Raises ValueError for a
    value out of range, and for one that the adapter does not know.
    """
    if adapter not in L2_ADAPTERS:
        raise ValueError(f"adapter is {adapter!r}; allowed: {', '.join(L2_ADAPTERS)}")
    if not str(cache_root).startswith("/"):
        raise ValueError(f"cache_root is {cache_root!r}; allowed: an absolute path")
    budget = _number("l2_size_gb", l2_size_gb)
    watermark = _number("trigger_watermark", trigger_watermark)
    ratio = _number("eviction_ratio", eviction_ratio)
    if not budget >= 0.01:
        raise ValueError(f"l2_size_gb is {l2_size_gb!r}; allowed: a number of GB, at least 0.01")
    if not 0 < watermark <= 1:
        raise ValueError(f"trigger_watermark is {trigger_watermark!r}; allowed: above 0, at most 1")
    if not 0 < ratio <= 1:
        raise ValueError(f"eviction_ratio is {eviction_ratio!r}; allowed: above 0, at most 1")
    if serde not in CODECS:
        raise ValueError(f"serde is {serde!r}; allowed: {', '.join(CODECS)}. A lossy one would change what is served")
    if adapter == "nixl_store_dynamic":
        if serde != "none":
            raise ValueError(f"serde is {serde!r}; allowed with {adapter}: none (it pads each file to full size)")
        if quotas_gb:
            raise ValueError(f"quotas_gb is {dict(quotas_gb)!r}; {adapter} knows no quotas, allowed: {{}}")
        return _compact(_nixl_store_dynamic(str(cache_root), budget, watermark, ratio, direct_io))
    if fsync not in FSYNC:
        raise ValueError(f"fsync is {fsync!r}; allowed: {', '.join(FSYNC)}")
    quotas = {str(name): int(_number(f"quota of {name}", size) * GB) for name, size in (quotas_gb or {}).items()}
    return _compact(
        {
            "type": "plugin",
            "module_path": "kvpersist_lmcache",
            "class_name": "StoreAdapter",
            "config_class_name": "StoreAdapterConfig",
            "adapter_params": {
                "root": str(cache_root),
                "budget_bytes": int(budget * GB),
                "reserve_bytes": int(_number("reserve_gb", reserve_gb) * GB),
                "quotas": quotas,
                "trigger_watermark": watermark,
                "eviction_ratio": ratio,
                "fsync": fsync,
                "gate_file": GATE_FILE,
            },
        }
    )


def _nixl_store_dynamic(root: str, budget_gb: float, watermark: float, ratio: float, direct_io: bool) -> Dict[str, Any]:
    """LMCache's own adapter (``DynamicNixlStoreL2Adapter``).

    It counts ``max_capacity_gb`` in GiB, so the budget is converted, rounded down. Every value
    of ``backend_params`` is a string, and without an ``eviction`` block nothing is ever evicted.
    """
    return {
        "type": "nixl_store_dynamic",
        "backend": "POSIX",
        "backend_params": {
            "file_path": root,
            "use_direct_io": "true" if direct_io else "false",
            "max_capacity_gb": f"{int(budget_gb * GB / GIB * 1000) / 1000:.3f}",
        },
        "eviction": {"eviction_policy": "LRU", "trigger_watermark": watermark, "eviction_ratio": ratio},
        "persist_enabled": True,
    }


def server_host(host: str) -> str:
    """``tcp://HOST`` as the connector wants it, from any spelling of a host.

    A scheme is optional, a port is dropped (it has its own option), IPv6 gets brackets and
    ``localhost`` becomes 127.0.0.1, where the server listens. Raises ValueError.
    """
    text = str(host).strip()
    bare = text[len("tcp://") :] if text.startswith("tcp://") else text
    if bare.count(":") > 1 and not bare.startswith("["):
        bare = f"[{bare}]"
    try:
        name: Optional[str] = urlsplit(f"tcp://{bare}").hostname
    except ValueError:
        name = None
    if not name or not re.fullmatch(r"[0-9a-z.:-]+", name) or "/" in bare:
        raise ValueError(f"host is {host!r}; allowed: an address or a name, with or without tcp:// and a port")
    if name == "localhost":
        name = "127.0.0.1"
    return f"tcp://[{name}]" if ":" in name else f"tcp://{name}"


def kv_transfer(host: str = "127.0.0.1", port: int = 5555, timeout: int = 60, heartbeat: int = 2) -> str:
    """Value of ``vllm serve --kv-transfer-config``.

    ``timeout`` and ``heartbeat`` are seconds. ``recompute``: a chunk that cannot be loaded
    costs a recompute, where vLLM's default fails the request. Raises ValueError.
    """
    number = int(_number("port", port))
    if not 1 <= number <= 65535:
        raise ValueError(f"port is {port!r}; allowed: 1 to 65535")
    return _compact(
        {
            "kv_connector": CONNECTOR,
            "kv_role": "kv_both",
            "kv_connector_module_path": CONNECTOR_MODULE_PATH,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "lmcache.mp.host": server_host(host),
                "lmcache.mp.port": number,
                # The server's own default; on CPU the connector hangs when left to choose.
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
                "lmcache.mp.mq_timeout": int(_number("timeout", timeout)),
                "lmcache.mp.heartbeat_interval": int(_number("heartbeat", heartbeat)),
            },
        }
    )


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if not 0 <= number < float("inf"):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}; allowed: a number, not negative") from None
    return number


def _compact(document: Dict[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))
