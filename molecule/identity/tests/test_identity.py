"""Each way to a wrong hit: first seen with a fixed --model string, then with the product. In order."""

import json
import secrets

import pytest
from conftest import CONFIG, MODEL_ONLY
from play import long, told

MODEL, OTHER, SPLIT = "/srv/tiny/model", "/srv/tiny/other", "/srv/tiny/split"
PINS = {}
CHAT = secrets.randbelow(10**9)  # new to every cache


def test_identify_writes_what_site_takes(identify, deploy, ask):
    PINS.update(identify())
    assert PINS["kvp_identity_kv_groups"] == [
        {"layers": 4, "kv_heads": 4, "k_head_dim": 32, "v_head_dim": 32, "window": 0, "mla": False}
    ]
    deploy(**PINS)
    answer, control = ask(CHAT)
    assert (answer["cached_tokens"], answer["token_ids"]) == (0, control["token_ids"])
    again, _ = ask(CHAT)
    assert again["cached_tokens"] > 0.8 * again["prompt_tokens"]
    assert again["token_ids"] == control["token_ids"]


@long
def test_what_is_stored_under_a_fixed_name(by_hand, ask):
    """The chat that the next tests ask again, of `model` in bfloat16 with blocks of 128."""
    by_hand("fixed", MODEL)
    stored, control = ask(CHAT + 1, config=CONFIG)
    assert stored["token_ids"] == control["token_ids"]


@long
@pytest.mark.parametrize(
    "served",
    [
        pytest.param({"model": OTHER}, id="weights"),
        pytest.param({"model": MODEL, "block_size": 64}, id="block-size"),
        pytest.param({"model": SPLIT}, id="head-split"),
        pytest.param({"model": MODEL, "dtype": "float16", "kv_cache_dtype": "float16"}, id="dtype"),
    ],
)
def test_a_fixed_name_gives_wrong_hits(by_hand, ask, served):
    """What the product is for: nothing but LMCache's own key, and the tokens are wrong."""
    by_hand("fixed", **served)
    hit, control = ask(CHAT + 1, config=CONFIG)
    assert hit["cached_tokens"] > 0.8 * hit["prompt_tokens"]
    assert hit["token_ids"] != control["token_ids"]


def files(host):
    return set(host.check_output("find /var/lib/kvpersist -name '*.bin' -printf '%f\\n'").split())


def misses_and_is_right(host, ask, conversation=CHAT):
    """The conversation that another identity has stored is recomputed; then it is this one's own."""
    before = files(host)
    answer, control = ask(conversation)
    assert (answer["cached_tokens"], answer["token_ids"]) == (0, control["token_ids"])
    again, _ = ask(conversation)
    assert again["cached_tokens"] > 0.8 * again["prompt_tokens"]
    assert before < files(host)


def test_another_block_size_is_another_namespace(host, deploy, ask):
    deploy(*MODEL_ONLY, **{**PINS, "kvp_identity_block_size": 64})
    misses_and_is_right(host, ask)


@long
def test_float16_is_another_namespace(host, deploy, ask):
    deploy(*MODEL_ONLY, **{**PINS, "kvp_identity_dtype": "float16", "kvp_identity_kv_cache_dtype": "float16"})
    misses_and_is_right(host, ask)


@long
def test_another_head_split_is_refused_and_then_another_namespace(host, play, identify, deploy, ask):
    variables = {"kvp_vllm_model_dir": SPLIT}
    code, output = play.site(**{**PINS, **variables})
    assert code != 0
    assert "kv_groups is pinned as" in told(output)
    assert "weights_fingerprint is pinned as" in told(output)
    assert "No service was touched" in told(output)
    deploy(*MODEL_ONLY, **identify(**variables))
    misses_and_is_right(host, ask)


@long  # two later tests come back to it too
def test_back_to_the_first_model_hits_its_own_cache(deploy, ask):
    deploy(*MODEL_ONLY, **PINS)
    answer, control = ask(CHAT)
    assert answer["cached_tokens"] > 0.8 * answer["prompt_tokens"]
    assert answer["token_ids"] == control["token_ids"]


def check(play, model=MODEL, arguments=("--dtype", "bfloat16", "--block-size", "128"), **parameters):
    """The module against the serving image."""
    arguments = [*arguments, "--max-model-len", "4096", "--enforce-eager"]
    image = "kvpersist/vllm-cpu:0.32.0"
    return play.module("identity_check", image=image, model_dir=model, arguments=arguments, **parameters)


FALSE = {
    "weights_fingerprint": "0" * 64,
    "weights_sha256": "0" * 64,
    "dtype": "float32",
    "quantization": "awq",
    "kv_cache_dtype": "fp8",
    "block_size": 32,
    "kv_groups": [{"layers": 4, "kv_heads": 2, "k_head_dim": 64, "v_head_dim": 64}],
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "max_model_len": 8192,
    "chat_template_sha256": "0" * 64,
    "vllm_version": "0.31.0",
    "vllm_commit": "0123456789",
    "lmcache_version": "0.5.5",
    "lmcache_commit": "0123456789",
}


def true_pins():
    pins = {name.removeprefix("kvp_identity_"): value for name, value in PINS.items() if "_identity_" in name}
    pins |= {"tokenizer_id": "x/y", "tokenizer_revision": "0" * 40, "weights_sha256": "", "hf_overrides": {}}
    pins |= {"connector": "x", "connector_module_path": "y", "chunk_size": 256, "hash_algorithm": "blake3"}
    return {**pins, "store_format": "raw", "model_revision": "0" * 40}


def test_a_false_pin_is_named(play):
    """Everything that the image can tell; the rest are names and commits of the operator."""
    pins = true_pins()
    assert check(play, fields=pins)["doubts"] == []
    checked = check(play, fields={**pins, **FALSE})
    assert {each["field"] for each in checked["differences"]} == set(FALSE)
    assert {doubt.partition(" is pinned as")[0] for doubt in checked["doubts"]} >= set(FALSE)


@long
@pytest.mark.parametrize("field", FALSE)
def test_a_single_false_pin_is_named(play, field):
    checked = check(play, fields={**true_pins(), field: FALSE[field]})
    assert [each["field"] for each in checked["differences"]] == [field]
    assert any(doubt.startswith(f"{field} is pinned as") for doubt in checked["doubts"])


@long  # the next test shows the same of other weights
def test_a_false_pin_stops_the_play(play):
    before = play.units()
    code, output = play.site("--tags", "identity", **{**PINS, "kvp_identity_vllm_commit": "0123456789"})
    assert code != 0
    assert "vllm_commit is pinned as" in told(output)
    assert play.units() == before


def status(host):
    run = host.run("kvp-admin status --json")
    return run.rc, json.loads(run.stdout)


def test_weights_swapped_in_place_are_served_uncached(host, play, identify, deploy, ask):
    host.check_output(f"mv {MODEL} {MODEL}.first && cp -r {OTHER} {MODEL} && systemctl restart kvpersist-vllm")
    try:
        answer, control = ask(CHAT)
        assert (answer["cached_tokens"], answer["token_ids"]) == (0, control["token_ids"])
        code, shown = status(host)
        assert (code, shown["caching"]) == (1, False)
        assert "are not the pinned ones" in shown["problems"][0]
        assert "kvp_serving_uncached 1" in host.file("/run/kvpersist/kvpersist.prom").content_string
        before = play.units()
        code, output = play.site(**PINS)
        assert code != 0
        assert "weights_fingerprint is pinned as" in told(output)
        assert play.units() == before
        deploy(*MODEL_ONLY, **identify())
        misses_and_is_right(host, ask)
    finally:
        host.check_output(f"rm -r {MODEL} && mv {MODEL}.first {MODEL}")
    deploy(*MODEL_ONLY, **PINS)
    answer, control = ask(CHAT)
    assert answer["cached_tokens"] > 0.8 * answer["prompt_tokens"]
    assert answer["token_ids"] == control["token_ids"]


def test_the_gate_takes_the_cache_from_a_vllm_that_differs(host, play, deploy, ask):
    """Another block size, by hand in what the launcher reads, under the namespaced name itself."""
    config = "/etc/kvpersist/vllm.json"
    block = "/--block-size/{n;s/128/64/}"
    host.check_output(f"sed -i '{block}' {config} && grep -A1 block-size {config} | grep 64")
    host.run("systemctl restart kvpersist-vllm")
    host.check_output("/usr/lib/kvpersist/wait-ready 240 1 http://127.0.0.1:8000/health")
    answer, control = ask(CHAT)
    assert (answer["cached_tokens"], answer["token_ids"]) == (0, control["token_ids"])
    code, shown = status(host)
    assert (code, shown["caching"]) == (1, False)
    assert "block_size: registered 64, pinned 128" in " ".join(shown["problems"])
    metrics = host.file("/run/kvpersist/kvpersist.prom").content_string
    assert "kvp_gate_refused 1" in metrics or "kvp_serving_uncached 1" in metrics
    code, output = play.site("--tags", "verify")
    assert code != 0
    assert "block_size: registered 64, pinned 128" in told(output)


def test_the_pinned_vllm_has_the_cache_back(host, deploy, ask):
    deploy(*MODEL_ONLY, **PINS)
    answer, control = ask(CHAT)
    assert answer["cached_tokens"] > 0.8 * answer["prompt_tokens"]
    assert answer["token_ids"] == control["token_ids"]
    assert status(host) == (0, {**status(host)[1], "caching": True})


def test_uncertain_is_served_uncached_when_asked_for(host, play, deploy, ask):
    uncertain = {**PINS, "kvp_identity_kv_cache_dtype": "auto", "kvp_identity_max_model_len": ""}
    code, output = play.site(**uncertain)
    assert code != 0
    for field in ("kv_cache_dtype", "max_model_len"):
        assert f"{field} is " in told(output)
    assert status(host)[0] == 0  # nothing was touched
    output = deploy(**uncertain, kvp_identity_uncertain="serve-uncached")
    assert "SERVING UNCACHED" in output
    answer, _ = ask(CHAT)
    assert (answer["cached_tokens"], answer["stored_chunks"]) == (0, 0)
    code, shown = status(host)
    assert (code, shown["caching"], shown["namespace"]) == (1, False, None)
    assert "serving uncached on purpose: kv_cache_dtype is" in shown["problems"][0]
    assert "kvp_serving_uncached 1" in host.file("/run/kvpersist/kvpersist.prom").content_string
    code, output = play.site(**uncertain, kvp_identity_uncertain="serve-uncached")
    assert "changed=0" in output


def test_kvp_admin_and_the_module_reproduce_the_published_vectors(host, play):
    vectors = json.loads((play.docs / "identity-vectors.json").read_text())
    for vector in vectors:
        fields = json.dumps(vector["fields"])
        shown = host.check_output("printf %%s %s | kvp-admin identity --json --fields -", fields)
        assert json.loads(shown) == {key: vector[key] for key in ("namespace", "model", "canonical")}
    checked = check(play, fields=vectors[-1]["fields"])
    assert (checked["namespace"], checked["model_name"]) == (vectors[-1]["namespace"], vectors[-1]["model"])


def test_a_kv_scheme_that_stands_outside_config_json_is_seen(play):
    """Nothing says --kv-cache-dtype; config.json has no quantization_config."""
    checked = check(play, model="/srv/tiny/fp8kv", arguments=())
    assert checked["doubts"] or checked["resolved"]["kv_cache_dtype"] == "fp8_e4m3"


def test_sliding_windows_need_vllms_prefix_cache_off(play):
    (doubt,) = check(play, model="/srv/tiny/sliding", arguments=())["doubts"]
    assert "--no-enable-prefix-caching" in doubt
    checked = check(play, model="/srv/tiny/sliding", arguments=("--no-enable-prefix-caching",))
    assert checked["doubts"] == []
    assert checked["resolved"]["kv_groups"][0]["window"] == 128


def test_a_recurrent_model_is_a_doubt(play):
    assert check(play, model="/srv/tiny/recurrent", arguments=())["doubts"]


def test_the_digest_of_the_template_is_that_of_its_output(host):
    """Equal on two days, another with any change of the output; a template that prints the date is found."""
    command = (
        "docker run --rm --network none --env HOME=/tmp --volume /usr/lib/kvpersist:/usr/lib/kvpersist:ro"
        " --volume /srv/tiny:/srv/tiny:ro kvpersist/vllm-cpu:0.32.0 python3 /srv/tiny/template_probe.py /srv/tiny/model"
    )
    seen = json.loads(host.check_output(command).splitlines()[-1])
    assert seen["today"] == seen["tomorrow"]
    assert seen["today"]["chat_template_dated"] is False
    assert seen["dated today"] == seen["dated tomorrow"]
    assert seen["dated today"]["chat_template_dated"] is True
    digests = [
        seen[name]["chat_template_sha256"] for name in ("today", "dated today", "one letter", "thinking", "tools")
    ]
    assert len(set(digests)) == len(digests)
