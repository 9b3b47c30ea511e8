"""Cache identity: what must be equal for two KV caches to be interchangeable.

LMCache's own key knows token ids, the ``--model`` string, the rank, the group and the
salt (``lmcache.v1.distributed.api.ObjectKey``), and nothing of weights, dtype or layout.
Everything else that changes KV bytes is pinned here, hashed into a namespace, and the
namespace becomes the end of the ``--model`` string.

Canonical form: a JSON object of the fields and ``schema``, keys sorted, no blanks, ASCII
with ``\\u`` escapes. Text is trimmed and Unicode NFC, its line ends are LF; digests and
choices are lower case; a whole number is an integer, whether it came as 4, "4" or 4.0;
a commit is its first 7 digits.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Tuple

#: Part of the hash: raised whenever the fields or their canonical form change.
SCHEMA_VERSION = 2

NAMESPACE_PREFIX = "kvp-"
NAMESPACE_HEX_DIGITS = 32

#: Longest ``lmcache_model_name()``. LMCache's file name adds 90 characters and a temp
#: suffix to it, and has to stay below the 255 bytes of a Linux file name.
MODEL_NAME_MAX = 100

#: vLLM's ``--dtype`` without ``auto`` and without its synonyms.
DTYPES = ("bfloat16", "float16", "float32")

#: KV dtypes with a lossless, statically known meaning, and vLLM's one synonym.
KV_CACHE_DTYPES = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2")
KV_CACHE_DTYPE_SYNONYMS = {"fp8": "fp8_e4m3"}


class IdentityError(ValueError):
    """A pin is missing, uncertain or malformed. The message names field, value and rule."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        shown = json.dumps(value, ensure_ascii=False, default=str)
        super().__init__(f"{field} is {shown}; allowed: {allowed}")


#: What a cache file is: LMCache's bare bytes, or our frame around them.
STORE_FORMATS = ("raw", "framed")


def _text(field: str, value: object) -> str:
    allowed = "a non-empty text without blanks, control characters, 'auto' or REPLACE_ME"
    if not isinstance(value, str):
        raise IdentityError(field, value, allowed)
    text = unicodedata.normalize("NFC", value.strip())
    if not text or text.lower() == "auto" or "REPLACE_ME" in text:
        raise IdentityError(field, value, allowed)
    if any(c.isspace() or unicodedata.category(c).startswith("C") for c in text):
        raise IdentityError(field, value, allowed)
    return text


def _hex(digits: int) -> Callable[[str, object], str]:
    def check(field: str, value: object) -> str:
        text = value.strip().lower() if isinstance(value, str) else ""
        if not re.fullmatch(f"[0-9a-f]{{{digits}}}", text):
            raise IdentityError(field, value, f"exactly {digits} hexadecimal digits")
        return text

    return check


def _count(field: str, value: object, least: int = 1) -> int:
    """A whole number, at least ``least``; ``4``, ``"4"`` and ``4.0`` are the same count."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < least:
        raise IdentityError(field, value, f"a whole number, at least {least}")
    return int(text)


def _choice(*choices: str, **synonyms: str) -> Callable[[str, object], str]:
    def check(field: str, value: object) -> str:
        text = value.strip().lower() if isinstance(value, str) else ""
        text = synonyms.get(text, text)
        if text not in choices:
            raise IdentityError(field, value, f"one of {', '.join(choices)}")
        return text

    return check


def _method(field: str, value: object) -> str:
    return _text(field, value).lower()


def _commit(field: str, value: object) -> str:
    """The first 7 digits, lower case, without the ``g`` of ``git describe``: builds cut it differently."""
    text = value.strip().lower() if isinstance(value, str) else ""
    if not re.fullmatch(r"g?[0-9a-f]{7,40}|none", text):
        raise IdentityError(field, value, "7 to 40 hexadecimal digits, or none for a build that names no commit")
    return text if text == "none" else (text[1:] if text.startswith("g") else text)[:7]


def _optional_hex(digits: int) -> Callable[[str, object], str]:
    def check(field: str, value: object) -> str:
        return "" if isinstance(value, str) and not value.strip() else _hex(digits)(field, value)

    return check


def _overrides(field: str, value: object) -> Dict[str, Any]:
    if not isinstance(value, Mapping):
        raise IdentityError(field, value, "a dictionary as vLLM's --hf-overrides takes it, {} for none")
    return {key: _canonical(f"{field}.{key}", element) for key, element in _named(field, value)}


def _named(field: str, value: Mapping[Any, object]) -> List[Tuple[str, object]]:
    """Items of a mapping whose keys are all text; 1 and "1" would be one key in JSON."""
    for key in value:
        if not isinstance(key, str):
            raise IdentityError(field, key, "text as a key")
    return [(unicodedata.normalize("NFC", key), element) for key, element in value.items()]


def _canonical(field: str, value: object) -> Any:
    """A JSON value, in which text and whole numbers have one spelling only."""
    if isinstance(value, Mapping):
        return {key: _canonical(f"{field}.{key}", element) for key, element in _named(field, value)}
    if isinstance(value, (list, tuple)):
        return [_canonical(f"{field}[{index}]", element) for index, element in enumerate(value)]
    if isinstance(value, str):
        return unicodedata.normalize("NFC", str(value).replace("\r\n", "\n").replace("\r", "\n"))
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and value - value == 0:  # neither infinite nor NaN
        return int(value) if value.is_integer() else value
    raise IdentityError(field, value, "text, finite numbers, true, false, null, lists and dictionaries")


_GROUP_COUNTS = ("layers", "kv_heads", "k_head_dim", "v_head_dim")
_GROUP_KEYS = (*_GROUP_COUNTS, "window", "mla")


def _kv_groups(field: str, value: object) -> List[Dict[str, int]]:
    """Layers of one shape each; K and V may differ, and a window makes another group."""
    allowed = (
        "a list of groups, each with the whole numbers layers, kv_heads, k_head_dim and v_head_dim, "
        "window (tokens) where the layers slide, and mla: true for one latent of k_head_dim that V shares"
    )
    if not isinstance(value, (list, tuple)) or not value:
        raise IdentityError(field, value, allowed)
    groups = []
    for index, group in enumerate(value):
        if not isinstance(group, Mapping) or not set(_GROUP_COUNTS) <= set(group) <= set(_GROUP_KEYS):
            raise IdentityError(f"{field}[{index}]", group, allowed)
        mla = str(group.get("mla") or 0).lower()
        if mla not in ("0", "1", "true", "false"):
            raise IdentityError(f"{field}[{index}].mla", group["mla"], "true or false")
        is_mla = mla in ("1", "true")
        checked = {
            key: _count(f"{field}[{index}].{key}", group[key], 0 if is_mla and key == "v_head_dim" else 1)
            for key in _GROUP_COUNTS
        }
        if is_mla and (checked["kv_heads"], checked["v_head_dim"]) != (1, 0):
            raise IdentityError(f"{field}[{index}]", group, "kv_heads 1 and v_head_dim 0 with mla: true")
        # 0 in the hash means full attention, so that leaving it out and null are equal.
        window = group.get("window")
        checked["window"] = 0 if window in (None, 0, "0", "") else _count(f"{field}[{index}].window", window)
        checked["mla"] = int(is_mla)
        groups.append(checked)
    layers: Dict[Tuple[int, ...], int] = {}
    for group in groups:  # 10 and 20 layers of one shape are 30
        shape = tuple(group[key] for key in _GROUP_KEYS[1:])
        layers[shape] = layers.get(shape, 0) + group["layers"]
    merged = sorted((count, *shape) for shape, count in layers.items())
    return [dict(zip(_GROUP_KEYS, values)) for values in merged]


#: Every field of the identity and the rule that checks and normalises it, in the order in
#: which identity.env lists them.
FIELDS: Mapping[str, Callable[[str, object], Any]] = {
    "model_id": _text,
    "model_revision": _hex(40),
    "tokenizer_id": _text,
    "tokenizer_revision": _hex(40),
    "weights_fingerprint": _hex(64),
    "weights_sha256": _optional_hex(64),
    "dtype": _choice(*DTYPES),
    "quantization": _method,
    "hf_overrides": _overrides,
    "kv_cache_dtype": _choice(*KV_CACHE_DTYPES, **KV_CACHE_DTYPE_SYNONYMS),
    "block_size": _count,
    "kv_groups": _kv_groups,
    "tensor_parallel_size": _count,
    "pipeline_parallel_size": _count,
    "decode_context_parallel_size": _count,
    "max_model_len": _count,
    "chat_template_sha256": _hex(64),
    "connector": _text,
    "connector_module_path": _text,
    "vllm_version": _text,
    "vllm_commit": _commit,
    "lmcache_version": _text,
    "lmcache_commit": _commit,
    "chunk_size": _count,
    "hash_algorithm": _choice("blake3", "sha256_cbor"),
    "store_format": _choice(*STORE_FORMATS),
}


def check_field(name: str, value: object) -> Any:
    """The normalised value of one field. Raises :class:`IdentityError`."""
    if name not in FIELDS:
        raise IdentityError(name, value, f"only these fields exist: {', '.join(FIELDS)}")
    if value is None:
        raise IdentityError(name, None, "a pinned value; without it nothing is cached")
    return FIELDS[name](name, value)


def doubts(fields: Mapping[str, object]) -> List[str]:
    """Everything that keeps these pins from being an identity; empty when they are one."""
    found = []
    for name in (*FIELDS, *sorted(set(fields) - set(FIELDS))):
        try:
            check_field(name, fields.get(name))
        except IdentityError as error:
            found.append(str(error))
    if not found:
        try:
            CacheIdentity.from_fields(fields)
        except IdentityError as error:
            found.append(str(error))
    return found


def rank_heads(group: Mapping[str, int], tensor_parallel_size: int) -> int:
    """KV heads that one tensor-parallel rank holds of each layer of a group.

    vLLM splits the heads evenly, and replicates them where there are fewer than ranks
    (``ModelConfig.get_num_kv_heads``); an MLA latent is never split. Raises
    :class:`IdentityError` where neither works out.
    """
    heads, ranks = group["kv_heads"], tensor_parallel_size
    if group["mla"]:
        return 1
    if heads % ranks if heads >= ranks else ranks % heads:
        raise IdentityError(
            "tensor_parallel_size", ranks, f"a number that divides the {heads} kv_heads, or that is a multiple of them"
        )
    return max(1, heads // ranks)


def env_names() -> Dict[str, str]:
    """Name of every field in identity.env, in its order."""
    return {name: f"KVP_{name.upper()}" for name in FIELDS}


def fields_from_env(variables: Mapping[str, str]) -> Dict[str, object]:
    """The fields as identity.env has them; lists and dictionaries are JSON there.

    Raises :class:`IdentityError` for JSON that is none.
    """
    fields: Dict[str, object] = {}
    for name, variable in env_names().items():
        value = variables.get(variable)
        if value is not None and name in ("kv_groups", "hf_overrides"):
            try:
                fields[name] = json.loads(value)
            except ValueError:
                raise IdentityError(name, value, "JSON") from None
        elif value is not None:
            fields[name] = value
    return fields


@dataclass(frozen=True)
class CacheIdentity:
    """Checked and normalised pins. Build one with :meth:`from_fields`.

    ``items`` are (name, value) pairs in the order of :data:`FIELDS`; head sizes are
    elements, block and chunk sizes and the maximum length are tokens.
    """

    items: Tuple[Tuple[str, Any], ...]

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> CacheIdentity:
        """Check every field. Raises :class:`IdentityError`: a pin that is missing, unknown or uncertain."""
        names = (*FIELDS, *sorted(set(fields) - set(FIELDS)))
        checked = {name: check_field(name, fields.get(name)) for name in names}
        # Under decode context parallelism one block of every rank together is what a chunk is cut into.
        block, chunk = checked["block_size"] * checked["decode_context_parallel_size"], checked["chunk_size"]
        if chunk % block:
            nearest = -(-chunk // block) * block
            raise IdentityError(
                "chunk_size", chunk, f"a multiple of block_size {block}; the next valid one is {nearest}"
            )
        for group in checked["kv_groups"]:
            rank_heads(group, checked["tensor_parallel_size"])
        return cls(tuple(checked.items()))

    def canonical_json(self) -> bytes:
        """The bytes that are hashed: sorted keys, no blanks, ASCII, integers as integers."""
        document = {"schema": SCHEMA_VERSION, **dict(self.items)}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    def namespace(self) -> str:
        """``kvp-`` and the first 32 hex digits of the canonical JSON's sha256 (seed, architecture)."""
        return NAMESPACE_PREFIX + hashlib.sha256(self.canonical_json()).hexdigest()[:NAMESPACE_HEX_DIGITS]

    def lmcache_model_name(self) -> str:
        """The ``--model`` string, and so the start of every cache file's name.

        At most :data:`MODEL_NAME_MAX` characters of ``[a-z0-9.-]``, ending in the
        namespace: what stands before it only helps a reader.
        """
        namespace = self.namespace()
        short = re.sub(r"[^a-z0-9.]+", "-", str(dict(self.items)["model_id"]).lower().rsplit("/", 1)[-1])
        short = short[: MODEL_NAME_MAX - len(namespace) - 1].strip("-.") or "model"
        return f"{short}-{namespace}"
