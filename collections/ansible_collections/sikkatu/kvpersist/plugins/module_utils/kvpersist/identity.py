"""Cache identity: what must be equal for two KV caches to be interchangeable.

LMCache's own key knows token ids, the ``--model`` string, the rank, the group and the
salt (``lmcache.v1.distributed.api.ObjectKey``), and nothing of weights, dtype or layout.
Everything else that changes KV bytes is pinned here, hashed into a namespace, and the
namespace becomes the end of the ``--model`` string.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Tuple

#: Part of the hash: raised whenever the fields or their canonical form change.
SCHEMA_VERSION = 1

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


def _count(field: str, value: object) -> int:
    """A whole number above 0; ``4``, ``"4"`` and ``4.0`` are the same count."""
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,12}", text) or int(text) < 1:
        raise IdentityError(field, value, "a whole number above 0")
    return int(text)


def _choice(*choices: str, **synonyms: str) -> Callable[[str, object], str]:
    def check(field: str, value: object) -> str:
        text = value.strip().lower() if isinstance(value, str) else ""
        text = synonyms.get(text, text)
        if text not in choices:
            raise IdentityError(field, value, f"one of {', '.join(choices)}")
        return text

    return check


_GROUP_COUNTS = ("layers", "kv_heads", "k_head_dim", "v_head_dim")


def _kv_groups(field: str, value: object) -> List[Dict[str, int]]:
    """Layers of one shape each; K and V may differ, and a window makes another group."""
    allowed = (
        "a list of groups, each with the whole numbers layers, kv_heads, k_head_dim and v_head_dim, "
        "and window (tokens) where the layers slide"
    )
    if not isinstance(value, (list, tuple)) or not value:
        raise IdentityError(field, value, allowed)
    groups = []
    for index, group in enumerate(value):
        if not isinstance(group, Mapping) or not set(_GROUP_COUNTS) <= set(group) <= {*_GROUP_COUNTS, "window"}:
            raise IdentityError(f"{field}[{index}]", group, allowed)
        checked = {key: _count(f"{field}[{index}].{key}", group[key]) for key in _GROUP_COUNTS}
        # 0 in the hash means full attention, so that leaving it out and null are equal.
        window = group.get("window")
        checked["window"] = 0 if window in (None, 0, "0", "") else _count(f"{field}[{index}].window", window)
        groups.append(checked)
    return sorted(groups, key=lambda g: tuple(g[k] for k in (*_GROUP_COUNTS, "window")))


#: Every field of the identity and the rule that checks and normalises it, in the order in
#: which identity.env lists them. The first ten and the digest are the seed's list.
FIELDS: Mapping[str, Callable[[str, object], Any]] = {
    "model_id": _text,
    "model_revision": _hex(40),
    "tokenizer_id": _text,
    "tokenizer_revision": _hex(40),
    "dtype": _choice(*DTYPES),
    "kv_cache_dtype": _choice(*KV_CACHE_DTYPES, **KV_CACHE_DTYPE_SYNONYMS),
    "block_size": _count,
    "kv_groups": _kv_groups,
    "tensor_parallel_size": _count,
    "pipeline_parallel_size": _count,
    "max_model_len": _count,
    "chat_template_sha256": _hex(64),
    "connector": _text,
    "connector_module_path": _text,
    "vllm_version": _text,
    "lmcache_version": _text,
    "chunk_size": _count,
    "hash_algorithm": _choice("blake3", "sha256_cbor"),
}


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
        unknown = sorted(set(fields) - set(FIELDS))
        if unknown:
            raise IdentityError(unknown[0], fields[unknown[0]], f"only these fields exist: {', '.join(FIELDS)}")
        checked = {}
        for name, check in FIELDS.items():
            if fields.get(name) is None:
                raise IdentityError(name, None, "a pinned value; without it nothing is cached")
            checked[name] = check(name, fields[name])
        if checked["chunk_size"] % checked["block_size"]:
            block, chunk = checked["block_size"], checked["chunk_size"]
            nearest = -(-chunk // block) * block
            raise IdentityError(
                "chunk_size", chunk, f"a multiple of block_size {block}; the next valid one is {nearest}"
            )
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
