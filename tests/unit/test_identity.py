"""The namespace: one for what is equal, another for what is not, none for what is uncertain."""

import hashlib
import json
import random
import re

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.identity import (
    FIELDS,
    CacheIdentity,
    IdentityError,
    doubts,
    env_names,
    fields_from_env,
    rank_heads,
)
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.render import env_file, read_env_file
from conftest import COLLECTION

PINS = {
    "model_id": "Qwen/Qwen3-32B",
    "model_revision": "9216db5781bf21249d130ec9da846c4624c16137",
    "tokenizer_id": "Qwen/Qwen3-32B",
    "tokenizer_revision": "9216db5781bf21249d130ec9da846c4624c16137",
    "weights_fingerprint": "c" * 64,
    "weights_sha256": "",
    "dtype": "bfloat16",
    "quantization": "none",
    "hf_overrides": {},
    "kv_cache_dtype": "bfloat16",
    "block_size": 16,
    "kv_groups": [{"layers": 64, "kv_heads": 8, "k_head_dim": 128, "v_head_dim": 128}],
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "max_model_len": 131072,
    "chat_template_sha256": "a" * 64,
    "connector": "LMCacheMPConnector",
    "connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
    "vllm_version": "0.32.0",
    "vllm_commit": "none",
    "lmcache_version": "0.5.6",
    "lmcache_commit": "3e11e10",
    "chunk_size": 256,
    "hash_algorithm": "blake3",
    "store_format": "raw",
}


def namespace(**changes):
    return CacheIdentity.from_fields({**PINS, **changes}).namespace()


def test_two_hundred_pairs_that_differ_in_one_field():
    """Random identities, each beside one that differs in one random field: no two share a namespace."""
    chooser = random.Random(7)
    seen = set()
    for number in range(200):
        base = {field: chooser.choice([value, *OTHER[field]]) for field, value in PINS.items()}
        base.update(model_id=f"org/model-{number}", block_size=16, decode_context_parallel_size=1)
        field = chooser.choice(list(FIELDS))
        other = chooser.choice([value for value in [PINS[field], *OTHER[field]] if value != base[field]])
        for fields in (base, {**base, field: other}):
            try:
                seen.add(CacheIdentity.from_fields(fields).namespace())
            except IdentityError:  # two values that no model has together; then another pair counts
                seen.add((number, field))
    assert len(seen) == 400


def test_ways_to_split_one_model_differ():
    """LMCache itself gives TP4 and TP2xPP2 the same ranks and object sizes."""
    splits = [(4, 1, 1), (2, 2, 1), (4, 1, 2), (4, 1, 4), (1, 4, 1), (8, 1, 1)]
    names = ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size")
    assert len({namespace(**dict(zip(names, split))) for split in splits}) == len(splits)


def test_two_kv_heads_are_replicated_and_ten_are_an_error():
    group = PINS["kv_groups"][0]
    assert rank_heads({**group, "kv_heads": 2, "mla": 0}, 4) == 1
    assert namespace(kv_groups=[{**group, "kv_heads": 2}])
    with pytest.raises(IdentityError, match="^tensor_parallel_size is 4; .* divides the 10 kv_heads"):
        namespace(kv_groups=[{**group, "kv_heads": 10}])


def test_every_doubt_is_told_at_once():
    assert doubts(PINS) == []
    told = doubts({**PINS, "dtype": "auto", "model_revision": "main", "colour": 1})
    assert [line.split(" is ")[0] for line in told] == ["model_revision", "dtype", "colour"]
    assert "the next valid one is 544" in doubts({**PINS, "block_size": 544})[0]
    assert len(doubts({})) == len(FIELDS)


def test_env_file_and_back():
    identity = CacheIdentity.from_fields({**PINS, "hf_overrides": {"a": "it's $x"}})
    pins = dict(identity.items)
    text = env_file({env_names()[name]: value for name, value in pins.items()})
    assert CacheIdentity.from_fields(fields_from_env(read_env_file(text))) == identity


def test_published_vectors():
    vectors = json.loads((COLLECTION / "docs/identity-vectors.json").read_text())
    assert len(vectors) >= 12
    for vector in vectors:
        identity = CacheIdentity.from_fields(vector["fields"])
        assert identity.canonical_json().decode() == vector["canonical"], vector["about"]
        assert identity.namespace() == vector["namespace"], vector["about"]
        assert identity.lmcache_model_name() == vector["model"], vector["about"]


def test_form_and_value():
    identity = CacheIdentity.from_fields(PINS)
    canonical = json.dumps(
        {**PINS, "schema": 2, "kv_groups": [{**PINS["kv_groups"][0], "window": 0, "mla": 0}]},
        sort_keys=True,
        separators=(",", ":"),
    ).encode()
    assert identity.canonical_json() == canonical
    assert identity.namespace() == "kvp-" + hashlib.sha256(canonical).hexdigest()[:32]
    assert identity.lmcache_model_name() == f"qwen3-32b-{identity.namespace()}"


OTHER = {
    "model_id": ["Qwen/Qwen3-14B", "qwen/Qwen3-32B"],
    "model_revision": ["0" * 40],
    "tokenizer_id": ["Qwen/Qwen3-8B"],
    "tokenizer_revision": ["1" * 40],
    "weights_fingerprint": ["d" * 64],
    "weights_sha256": ["c" * 64, "d" * 64],
    "dtype": ["float16", "float32"],
    "quantization": ["fp8", "awq"],
    "hf_overrides": [
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2}},
        {"max_position_embeddings": "4"},
        {"max_position_embeddings": 4},
        {"max_position_embeddings": None},
    ],
    "kv_cache_dtype": ["float16", "fp8_e4m3", "fp8_e5m2", "float32"],
    "block_size": [8, 32, 64, 128, 256],
    "kv_groups": [
        [{"layers": 64, "kv_heads": 4, "k_head_dim": 256, "v_head_dim": 256}],
        [{"layers": 64, "kv_heads": 8, "k_head_dim": 192, "v_head_dim": 128}],
        [{"layers": 64, "kv_heads": 8, "k_head_dim": 128, "v_head_dim": 128, "window": 128}],
        [{"layers": 65, "kv_heads": 8, "k_head_dim": 128, "v_head_dim": 128}],
        [{"layers": 61, "kv_heads": 1, "k_head_dim": 576, "v_head_dim": 0, "mla": True}],
        [{"layers": 61, "kv_heads": 1, "k_head_dim": 576, "v_head_dim": 1}],
    ],
    "tensor_parallel_size": [1, 2, 8],
    "pipeline_parallel_size": [2, 4],
    "decode_context_parallel_size": [2, 4],
    "max_model_len": [32768, 131071],
    "chat_template_sha256": ["b" * 64],
    "vllm_version": ["0.31.0", "0.32.1"],
    "vllm_commit": ["3e11e10", "0" * 40],
    "lmcache_version": ["0.5.5"],
    "lmcache_commit": ["none", "3e11e19"],
    "connector": ["AnotherConnector"],
    "connector_module_path": ["lmcache.another"],
    "chunk_size": [512, 1024],
    "hash_algorithm": ["sha256_cbor"],
    "store_format": ["framed"],
}


def test_every_field_changes_the_namespace():
    assert set(OTHER) == set(FIELDS)
    variants = [(field, value) for field, values in OTHER.items() for value in values]
    seen = {namespace()} | {namespace(**{field: value}) for field, value in variants}
    assert len(seen) == len(variants) + 1


def test_order_and_spelling_do_not():
    shuffled = list(PINS.items())
    random.Random(1).shuffle(shuffled)
    same = [
        dict(shuffled),
        {**PINS, "tensor_parallel_size": "4", "block_size": 16.0, "chunk_size": " 256 "},
        {**PINS, "model_revision": PINS["model_revision"].upper() + "\n", "dtype": "BFloat16"},
        {**PINS, "kv_groups": [{**PINS["kv_groups"][0], "window": None}]},
    ]
    assert {CacheIdentity.from_fields(fields).namespace() for fields in same} == {namespace()}
    rope = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "a": [1, True, None]}}
    assert namespace(hf_overrides=rope) == namespace(
        hf_overrides={"rope_parameters": {"a": (1.0, True, None), "factor": 4, "rope_type": "yarn"}}
    )
    assert namespace(lmcache_commit="G3E11E108d0c1") == namespace()
    assert namespace(model_id="Gr\u00fc\u00df/e") == namespace(model_id=" Gru\u0308\u00df/e\r\n")
    assert namespace(kv_cache_dtype="fp8") == namespace(kv_cache_dtype="fp8_e4m3")
    one, two = PINS["kv_groups"][0], {"layers": 20, "kv_heads": 4, "k_head_dim": 64, "v_head_dim": 64}
    assert namespace(kv_groups=[one, two]) == namespace(kv_groups=[two, one])
    assert namespace(kv_groups=[{**one, "layers": 60}, two, {**one, "layers": 4}]) == namespace(kv_groups=[one, two])


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [None, "", "  ", "auto", "REPLACE_ME", [], True, "a b\nc"])
def test_uncertain_is_refused_by_name(field, value):
    if field == "weights_sha256" and value in ("", "  "):
        return  # the one pin that may be left out: the fingerprint is enough
    with pytest.raises(IdentityError) as refusal:
        namespace(**{field: value})
    assert str(refusal.value).startswith(field)
    assert "allowed:" in str(refusal.value)


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_pin_is_refused_by_name(field):
    with pytest.raises(IdentityError, match=f"^{field} is null"):
        CacheIdentity.from_fields({k: v for k, v in PINS.items() if k != field})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_revision", "main"),
        ("model_revision", "9" * 39),
        ("model_revision", "g" * 40),
        ("chat_template_sha256", "a" * 40),
        ("kv_cache_dtype", "fp8_inc"),
        ("dtype", "half"),
        ("block_size", 0),
        ("block_size", -16),
        ("block_size", 16.5),
        ("tensor_parallel_size", "4x"),
        ("kv_groups", [{"layers": 64, "kv_heads": 8, "head_dim": 128}]),
        ("kv_groups", [{"layers": 64, "kv_heads": 8, "k_head_dim": 128, "v_head_dim": 128, "colour": 1}]),
        ("kv_groups", "64x8x128"),
        ("hash_algorithm", "builtin"),
    ],
)
def test_malformed_is_refused(field, value):
    with pytest.raises(IdentityError, match=f"^{field}"):
        namespace(**{field: value})


def test_unknown_field_is_refused():
    with pytest.raises(IdentityError, match="^colour"):
        namespace(colour="red")


@pytest.mark.parametrize(("block", "nearest"), [(544, 544), (640, 640), (400, 400), (784, 784), (96, 288)])
def test_chunk_that_no_block_divides_names_the_next_one(block, nearest):
    with pytest.raises(IdentityError, match=f"the next valid one is {nearest}$"):
        namespace(block_size=block)


@pytest.mark.parametrize(
    "model_id",
    ["a/b", "a--b", "b", "модель/Сбер", "模型", "x" * 190, "A@B", "-..-", "MiMo_V2.6-Pro", "a/" + "b-" * 90],
)
def test_names_are_short_safe_and_different(model_id):
    name = CacheIdentity.from_fields({**PINS, "model_id": model_id}).lmcache_model_name()
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*-kvp-[0-9a-f]{32}", name)
    assert len(name) <= 100
    # LMCache's file name: model_rank(8)_group(1)_hash(64).bin.tmp.hex
    assert len(f"{name}_00000000_0_{'0' * 64}.bin.tmp.{'0' * 32}") <= 255


def test_different_ids_never_share_a_name():
    ids = ["a/b", "a--b", "a-b", "A/B", "b", "x/b", "a@b", "модель", "模型"]
    names = {CacheIdentity.from_fields({**PINS, "model_id": i}).lmcache_model_name() for i in ids}
    assert len(names) == len(ids)
