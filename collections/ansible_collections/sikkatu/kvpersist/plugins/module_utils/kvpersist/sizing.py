"""How many bytes the KV of a model takes: per token and rank, per chunk, in L1 and on disk."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

from .identity import CacheIdentity, rank_heads
from .objects import HEADER_BYTES, PAGE_BYTES

GIB = 1024**3
GB = 10**9

#: Bytes of one element (vLLM's ``STR_DTYPE_TO_TORCH_DTYPE``).
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def group_bytes(group: Mapping[str, int], kv_cache_dtype: str, tensor_parallel_size: int) -> int:
    """Bytes that one token takes on one tensor-parallel rank, over all layers of a KV group.

    MLA keeps one latent per layer, which V shares and no rank splits. Raises
    :class:`IdentityError` where the heads cannot be split.
    """
    elements = group["layers"] * rank_heads(group, tensor_parallel_size) * (group["k_head_dim"] + group["v_head_dim"])
    return elements * ELEMENT_BYTES[kv_cache_dtype]


def kv_pieces(identity: CacheIdentity) -> int:
    """Pieces that the KV of one chunk and one pipeline stage is split into.

    One for each tensor-parallel rank; but where all layers are MLA every rank holds the same,
    so only the shares of decode context parallelism differ (LMCache,
    ``ParallelStrategy.kv_world_size``).
    """
    pins = dict(identity.items)
    all_mla = all(group["mla"] for group in pins["kv_groups"])
    return int(pins["decode_context_parallel_size"] if all_mla else pins["tensor_parallel_size"])


def plan(identity: CacheIdentity, l1_size_gb: float, l2_size_gb: float) -> Dict[str, Any]:
    """What the identity's KV costs and how much of it fits.

    ``l1_size_gb`` is GiB and ``l2_size_gb`` GB of 10^9 bytes, as everywhere. A rank is one
    tensor-parallel rank, and holds all layers: under pipeline parallelism read the bytes per
    rank and per file as sums over the stages. Page alignment is counted.
    """
    pins = dict(identity.items)
    ranks, chunk, dtype = pins["tensor_parallel_size"], pins["chunk_size"], pins["kv_cache_dtype"]
    groups = [{**group, "token_bytes": group_bytes(group, dtype, ranks)} for group in pins["kv_groups"]]
    per_rank = sum(group["token_bytes"] for group in groups)
    # Decode context parallelism gives each of its ranks a share of a chunk's tokens.
    shares = pins["decode_context_parallel_size"]
    # Of a sliding layer LMCache keeps the end of each chunk that the window reaches.
    stored = sum(each["token_bytes"] * min(each["window"] or chunk, chunk) for each in groups)
    chunk_bytes = -(-stored // shares // PAGE_BYTES) * PAGE_BYTES
    pieces = kv_pieces(identity)
    token_bytes = chunk_bytes * pieces / chunk
    return {
        "kv_groups": groups,
        "token_bytes_per_rank": per_rank,
        "token_bytes": int(token_bytes),
        "chunk_tokens": chunk,
        "chunk_file_bytes": chunk_bytes + (HEADER_BYTES if pins["store_format"] == "framed" else 0),
        "files_per_chunk": pieces * pins["pipeline_parallel_size"],
        "l1_tokens": int(l1_size_gb * GIB / token_bytes) // chunk * chunk,
        "l2_tokens": int(l2_size_gb * GB / token_bytes) // chunk * chunk,
    }


def warnings(
    planned: Mapping[str, Any],
    l1_size_gb: float,
    l2_size_gb: float,
    memory_bytes: Optional[int],
    disk_bytes: Optional[int],
    max_model_len: int,
) -> List[str]:
    """What about the sizes will disappoint. ``disk_bytes`` is the size of the cache's file system."""
    found = []
    if memory_bytes is not None and l1_size_gb * GIB >= memory_bytes:
        found.append(f"kvp_l1_size_gb is {l1_size_gb:g} GiB, but the host has {memory_bytes / GIB:.1f} GiB of memory")
    if disk_bytes is not None and l2_size_gb * GB > disk_bytes:
        found.append(f"kvp_l2_size_gb is {l2_size_gb:g} GB, but the disk has {disk_bytes / GB:.1f} GB")
    if planned["l2_tokens"] < max_model_len:
        found.append(f"the disk budget holds {planned['l2_tokens']} tokens, less than one chat of {max_model_len}")
    return found
