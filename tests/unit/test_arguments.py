"""Extra arguments and variables of vLLM: what is not known to be harmless is a doubt."""

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.arguments import (
    docker_variables,
    doubtful_arguments,
    doubtful_server_arguments,
    doubtful_variables,
    option,
)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--enforce-eager", "--num-gpu-blocks-override", "128"],
        ["--max_num_seqs=64", "--no-enable-prefix-caching", "--tool-call-parser", "hermes", "-O3", "-O=1", "-O"],
        ["--seed", "-1", "--override-generation-config", '{"a": "--lora"}'],
    ],
)
def test_known_options_are_no_doubt(words):
    assert doubtful_arguments(words) == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--calculate-kv-scales"], "--calculate-kv-scales"),
        (["--enable-lora"], "--enable-lora"),
        (["--enable_lora=true"], "--enable-lora"),
        (["--no-enable-hybrid"], "--enable-hybrid"),
        (["--rope-scaling", "{}"], "--rope-scaling"),
        (["--rope-scaling.factor=2"], "--rope-scaling"),
        (["--speculative-config", "{}"], "--speculative-config"),
        (["--attention-backend", "X"], "--attention-backend"),
        (["--kv-cache-dtype-skip-layers", "0"], "--kv-cache-dtype-skip-layers"),
        (["--disable-hybrid-kv-cache-manager"], "--disable-hybrid-kv-cache-manager"),
        (["--load-format", "dummy"], "--load-format"),
        (["--an-option-of-next-year"], "--an-option-of-next-year"),
        (["--enforce"], "--enforce"),
        (["-x"], "-x"),
        (["-O=--hf-overrides.rope_theta=1", "2"], "-O=--hf-overrides.rope_theta=1"),
        (["-O--attention-config"], "-O--attention-config"),
        (["--mm-processor-cache-gb", "0"], "--mm-processor-cache-gb"),
    ],
)
def test_anything_else_is_one_and_named(words, name):
    (doubt,) = doubtful_arguments(words)
    assert doubt.startswith(f"{name} among the extra arguments; allowed:")


@pytest.mark.parametrize(
    ("word", "field"),
    [("--dtype=half", "dtype"), ("--quantization", "quantization"), ("-tp", "tensor_parallel_size"),
     ("--hf_overrides.rope_parameters.factor=2", "hf_overrides"), ("--kv_cache_dtype", "kv_cache_dtype")],
)  # fmt: skip
def test_a_pinned_option_names_its_pin(word, field):
    assert doubtful_arguments([word])[0].endswith(f"allowed: the pin {field}")


def test_options_and_values():
    assert option("--a_b.c=d") == "--a-b"
    assert option("-1") is option("-.5") is option("value") is option("-") is option(3) is None


def test_variables():
    harmless = ["PATH", "HF_HUB_OFFLINE", "VLLM_LOGGING_LEVEL", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"]
    assert doubtful_variables(harmless) == []
    for name in (
        "PYTHONPATH",
        "LD_PRELOAD",
        "NVIDIA_TF32_OVERRIDE",
        "VLLM_KV_CACHE_LAYOUT",
        "VLLM_MLA_DISABLE",
        "LMCACHE_CHUNK_SIZE",
    ):
        (doubt,) = doubtful_variables([name])
        assert doubt.startswith(f"{name} in the environment; allowed")


@pytest.mark.parametrize(
    "words",
    [["--env", "A=1"], ["--env=A=1"], ["-e", "A=1"], ["-eA=1"], ["-e=A"], ["-ie", "A"], ["-iteA=b"], ["--env", "A"]],
)
def test_variables_among_the_arguments_of_docker(words):
    assert docker_variables(["--volume", "/e:/e", *words, "--shm-size", "1g"]) == ["A"]


def test_arguments_of_the_server():
    assert doubtful_server_arguments(["--max-workers=4", "--l1-use-lazy", "--session-ttl-seconds", "5"]) == []
    for name in ("--separate-object-groups", "--engine-type", "--null-block-id", "--chunk-siz", "--http-hos", "--host"):
        assert doubtful_server_arguments([f"{name}=1"]) == [name]
