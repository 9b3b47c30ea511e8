"""Bytes of KV: the figures of known models at TP4 in bfloat16, per token and rank."""

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.identity import CacheIdentity
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.sizing import plan, warnings
from test_identity import PINS


def group(layers, kv_heads, k_head_dim, v_head_dim=None, **more):
    v_head_dim = k_head_dim if v_head_dim is None else v_head_dim
    return {"layers": layers, "kv_heads": kv_heads, "k_head_dim": k_head_dim, "v_head_dim": v_head_dim, **more}


def planned(groups, l1=64, l2=1500, **changes):
    return plan(CacheIdentity.from_fields({**PINS, "kv_groups": groups, **changes}), l1, l2)


MODELS = {
    "Llama-3.1-70B": ([group(80, 8, 128)], [81920]),
    "Qwen3-32B": ([group(64, 8, 128)], [65536]),
    "Qwen3-235B-A22B": ([group(94, 4, 128)], [48128]),
    "DeepSeek-V3": ([group(61, 1, 576, 0, mla=True)], [70272]),
    "gpt-oss-120b": ([group(18, 8, 64), group(18, 8, 64, window=128)], [9216, 9216]),
    "MiMo-V2-Flash": ([group(9, 4, 192, 128), group(39, 8, 192, 128, window=128)], [5760, 49920]),
    "MiMo-V2.6-Pro": ([group(10, 8, 192, 128), group(60, 8, 192, 128, window=128)], [12800, 76800]),
}


@pytest.mark.parametrize("model", MODELS)
def test_bytes_per_token_and_rank(model):
    groups, expected = MODELS[model]
    found = planned(groups)
    assert [each["token_bytes"] for each in found["kv_groups"]] == expected
    assert found["token_bytes_per_rank"] == sum(expected)


def test_ranks_and_files():
    found = planned(MODELS["Qwen3-32B"][0])
    assert found["chunk_file_bytes"] == 65536 * 256
    framed = planned(MODELS["Qwen3-32B"][0], store_format="framed")
    assert framed["chunk_file_bytes"] == 65536 * 256 + 4096  # the header's page
    assert (found["files_per_chunk"], found["token_bytes"]) == (4, 4 * 65536)
    assert found["l1_tokens"] == 64 * 2**30 // (4 * 65536)
    assert found["l2_tokens"] == 1500 * 10**9 // (4 * 65536) // 256 * 256
    two_heads = planned([group(64, 2, 128)])
    assert two_heads["token_bytes_per_rank"] == 64 * 128 * 2 * 2
    mla = planned(MODELS["DeepSeek-V3"][0])
    assert (mla["files_per_chunk"], mla["token_bytes"]) == (1, 70272)
    shared = planned(MODELS["DeepSeek-V3"][0], decode_context_parallel_size=4)
    assert (shared["files_per_chunk"], shared["token_bytes"]) == (4, 70272)
    assert planned([group(64, 8, 128)], kv_cache_dtype="fp8")["token_bytes_per_rank"] == 32768


def test_of_a_sliding_layer_only_the_window_is_kept():
    found = planned(MODELS["MiMo-V2.6-Pro"][0])
    assert found["chunk_file_bytes"] == 12800 * 256 + 76800 * 128
    assert planned([group(60, 8, 128, window=1024)])["chunk_file_bytes"] == 61440 * 256


def test_warnings():
    found = planned(MODELS["Qwen3-32B"][0], l1=64, l2=30)
    told = warnings(found, 64, 30, memory_bytes=32 * 2**30, disk_bytes=20 * 10**9, max_model_len=131072)
    assert told[0] == "kvp_l1_size_gb is 64 GiB, but the host has 32.0 GiB of memory"
    assert told[1] == "kvp_l2_size_gb is 30 GB, but the disk has 20.0 GB"
    assert "less than one chat of 131072" in told[2]
    assert warnings(planned(MODELS["Qwen3-32B"][0]), 64, 1500, 2**38, 2 * 10**12, 131072) == []
