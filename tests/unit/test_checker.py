"""The comparison with the serving image, with a stand-in for docker: what is asked, kept and compared."""

import json
import os
import sys

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import checker
from test_identity import PINS

RESOLVED = {
    "dtype": "bfloat16",
    "quantization": "none",
    "kv_cache_dtype": "bfloat16",
    "block_size": 16,
    "kv_groups": [{"layers": 64, "kv_heads": 8, "k_head_dim": 128, "v_head_dim": 128, "window": 0, "mla": False}],
    "tensor_parallel_size": 4,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "max_model_len": 131072,
    "chat_template_sha256": "a" * 64,
    "weights_fingerprint": "c" * 64,
    "vllm_version": "0.32.0",
    "vllm_commit": "none",
    "lmcache_version": "0.5.6",
    "lmcache_commit": "3e11e108d0c1f9d7a3c0b1a2d3e4f5a6b7c8d9e0",
}


def test_true_pins_have_no_difference():
    assert checker.differences(PINS, RESOLVED) == []
    assert checker.differences({**PINS, "block_size": "16", "dtype": "BFloat16"}, RESOLVED) == []


FALSE = {
    "dtype": "float16",
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e4m3",
    "block_size": 32,
    "kv_groups": [{"layers": 64, "kv_heads": 4, "k_head_dim": 256, "v_head_dim": 256}],
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "decode_context_parallel_size": 2,
    "max_model_len": 4096,
    "chat_template_sha256": "b" * 64,
    "weights_fingerprint": "d" * 64,
    "vllm_version": "0.31.0",
    "vllm_commit": "3e11e108",
    "lmcache_version": "0.5.5",
    "lmcache_commit": "3e11e19",
}


@pytest.mark.parametrize("field", RESOLVED)
@pytest.mark.parametrize("falsify", [lambda field: FALSE[field], lambda field: "", lambda field: "auto"])
def test_a_false_or_blank_pin_is_named(field, falsify):
    (difference,) = checker.differences({**PINS, field: falsify(field)}, RESOLVED)
    assert difference["field"] == field
    assert difference["pinned"] != difference["found"]


def test_a_value_that_no_identity_can_carry_is_a_difference():
    (difference,) = checker.differences(PINS, {**RESOLVED, "kv_cache_dtype": "fp8_ds_mla"})
    assert difference == {"field": "kv_cache_dtype", "pinned": "bfloat16", "found": "fp8_ds_mla"}


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """A checker with a stand-in for docker that counts its calls and prints ANSWER."""
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "if sys.argv[1] == 'image':\n"
        "    sys.exit(print(os.environ['IMAGE_ID']) if os.environ['IMAGE_ID'] else 'no such image')\n"
        "open(os.environ['CALLS'], 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "print(os.environ['ANSWER'])\n"
        "sys.exit(int(os.environ.get('CODE', '0')))\n"
    )
    docker.chmod(0o755)
    calls = tmp_path / "calls"
    calls.write_text("")
    for name, value in {"CALLS": str(calls), "ANSWER": json.dumps(RESOLVED), "IMAGE_ID": "sha256:1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    resolver = tmp_path / "resolve-identity"
    resolver.write_text("v1")
    monkeypatch.setattr(checker, "RESOLVER", str(resolver))
    monkeypatch.setattr(checker, "CACHE_FILE", str(tmp_path / "cache/resolved.json"))
    model = tmp_path / "hub/snapshots/x"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "weights.bin").write_bytes(b"w")

    def run(*arguments, with_content=False):
        check = checker.Checker(
            "image", f"{model}/", str(tmp_path / "hub"), arguments, ["--gpus", "all"], "python3", 60
        )
        return check.resolve(["Connector", "module"], with_content), len(calls.read_text().splitlines())

    run.model, run.resolver, run.calls, run.path = model, resolver, calls, tmp_path
    return run


def test_it_is_asked_once_for_each_image_model_and_arguments(ask, monkeypatch):
    answer, calls = ask("--dtype", "bfloat16")
    assert (answer["known"], calls) == (False, 1)
    told = ask.calls.read_text()
    assert "--network none" in told
    assert f"{ask.path}/hub:/kvpersist/model:ro" in told
    assert "--connector Connector module /kvpersist/model/snapshots/x --dtype bfloat16" in told
    assert ask("--dtype", "bfloat16")[1] == 1
    assert ask("--dtype", "bfloat16")[0]["known"] is True
    assert ask("--dtype", "float16")[1] == 2
    assert ask("--dtype", "bfloat16")[1] == 2  # both are kept
    ask.resolver.write_text("v2")
    assert ask("--dtype", "bfloat16")[1] == 3
    monkeypatch.setenv("IMAGE_ID", "sha256:2")
    assert ask("--dtype", "bfloat16")[1] == 4
    before = ask("--dtype", "bfloat16")[0]["weights_fingerprint"]
    (ask.model / "weights.bin").write_bytes(b"W")
    answer, calls = ask("--dtype", "bfloat16")
    assert (answer["weights_fingerprint"] != before, calls) == (True, 5)
    for name in ("chat_template.jinja", "tokenizer.json"):
        (ask.model / name).write_text("x")
    assert ask("--dtype", "bfloat16")[1] == 6


def test_a_snapshot_of_a_hub_cache_names_itself(ask, tmp_path):
    directory = tmp_path / f"models--org--a--name/snapshots/{'a' * 40}"
    check = checker.Checker("image", str(directory), str(tmp_path), [], [], "python3", 60)
    assert check._named_by_its_path() == {"model_id": "org/a--name", "model_revision": "a" * 40}
    assert "model_id" not in ask()[0]


def test_a_damaged_cache_file_only_costs_a_question(ask):
    ask()
    for damage in ("{", "[]", ""):
        (ask.path / "cache/resolved.json").write_text(damage)
        assert ask()[0]["dtype"] == "bfloat16"


def test_an_error_of_the_image_is_not_kept(ask, monkeypatch):
    monkeypatch.setenv("ANSWER", '{"failed": "ValueError: no"}')
    assert ask()[0]["failed"] == "ValueError: no"
    monkeypatch.setenv("ANSWER", json.dumps(RESOLVED))
    assert "failed" not in ask()[0]


def test_the_content_is_read_once_for_the_same_files(ask, monkeypatch):
    read = []
    real = checker.weights.content_sha256
    monkeypatch.setattr(checker.weights, "content_sha256", lambda path: read.append(path) or real(path))
    assert "weights_sha256" not in ask()[0]
    first = ask(with_content=True)[0]["weights_sha256"]
    assert ask(with_content=True)[0]["weights_sha256"] == first
    assert len(read) == 1
    assert "weights_sha256" not in ask()[0]
    assert ask(with_content=True)[0]["weights_sha256"] == first
    (ask.model / "weights.bin").touch()
    assert ask(with_content=True)[0]["weights_sha256"] == first
    assert len(read) == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"IMAGE_ID": ""}, "docker does not have the image"),
        ({"ANSWER": "hello"}, "no JSON"),
        ({"CODE": "125"}, "could not run"),
    ],
)
def test_what_cannot_be_asked_is_an_error(ask, monkeypatch, change, told):
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(checker.CheckerError, match=told):
        ask()


def test_without_docker_it_says_so(ask, monkeypatch):
    monkeypatch.setenv("PATH", str(ask.path))
    with pytest.raises(checker.CheckerError, match="docker: No such file"):
        ask()
