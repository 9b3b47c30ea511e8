"""The fingerprint: other weights under the same names and sizes are other weights."""

import json
import os
import struct

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import weights


def shard(path, tensors):
    """A safetensors file of named byte strings."""
    table, at = {"__metadata__": {"format": "pt"}}, 0
    for name, data in tensors.items():
        table[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text('{"layers": 2}')
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    for number in (1, 2):
        shard(tmp_path / f"model-{number}.safetensors", {"a": bytes([number]) * 9000, "b": b"\0" * 100, "c": b""})
    return tmp_path


def test_equal_copies_are_equal(model, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    for path in sorted(model.iterdir(), reverse=True):
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "README.md").write_text("hello")
    (copy / "generation_config.json").write_text("{}")
    assert weights.fingerprint(str(copy)) == weights.fingerprint(str(model)) == weights.fingerprint(f"{model}/")
    assert weights.content_sha256(str(copy)) == weights.content_sha256(str(model))


def swap_tensor(model):
    shard(model / "model-2.safetensors", {"a": b"\3" * 9000, "b": b"\0" * 100, "c": b""})


def small_tensor(model):
    shard(model / "model-2.safetensors", {"a": b"\2" * 9000, "b": b"\0" * 99 + b"\1", "c": b""})


def rename(model):
    (model / "model-2.safetensors").rename(model / "model-3.safetensors")


def swap_files(model):
    (model / "model-1.safetensors").rename(model / "x")
    (model / "model-2.safetensors").rename(model / "model-1.safetensors")
    (model / "x").rename(model / "model-2.safetensors")


def configure(model):
    (model / "config.json").write_text('{"layers": 3}')


def quantise(model):
    (model / "hf_quant_config.json").write_text("{}")


def code(model):
    (model / "modeling_x.py").write_text("pass")


def quantise_awq(model):
    (model / "quant_config.json").write_text("{}")


def look_elsewhere(model):
    (model / "preprocessor_config.json").write_text('{"image_mean": [0]}')


def grow(model):
    (model / "extra.bin").write_bytes(b"")


CHANGES = [swap_tensor, small_tensor, rename, swap_files, configure, quantise, quantise_awq, look_elsewhere, code, grow]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_is_seen(model, change):
    before, content = weights.fingerprint(str(model)), weights.content_sha256(str(model))
    change(model)
    assert weights.fingerprint(str(model)) != before
    assert weights.content_sha256(str(model)) != content


def test_one_byte_outside_the_samples_is_for_the_full_digest(model):
    before, content = weights.fingerprint(str(model)), weights.content_sha256(str(model))
    with open(model / "model-1.safetensors", "r+b") as file:
        file.seek(-8000, os.SEEK_END)
        file.write(b"\7")
    assert weights.fingerprint(str(model)) == before
    assert weights.content_sha256(str(model)) != content


def test_a_file_without_a_table_is_sampled(model):
    (model / "pytorch_model.bin").write_bytes(b"\0" * 5_000_000)
    before = weights.fingerprint(str(model))
    (model / "pytorch_model.bin").write_bytes(b"\1" * 5_000_000)
    assert weights.fingerprint(str(model)) != before


def test_links_into_blobs_are_followed(model, tmp_path_factory):
    snapshot = tmp_path_factory.mktemp("snapshot")
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert weights.fingerprint(str(snapshot)) == weights.fingerprint(str(model))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"GIF89a", "not a safetensors file"),
        (struct.pack("<Q", 2**62), "would be 4611686018427387904 bytes long"),
        (struct.pack("<Q", 4) + b"null", "no table of tensors"),
        (struct.pack("<Q", 40) + b'{"a":{"data_offsets":[0,Infinity]}}     ', "no table of tensors"),
        (struct.pack("<Q", 100000) + b"[" * 100000, "no table of tensors"),
        (struct.pack("<Q", 2) + b"{}" + b"x", None),
    ],
)
def test_what_is_no_safetensors_file_is_said(model, data, reason):
    (model / "model-1.safetensors").write_bytes(data)
    if reason is None:
        assert weights.fingerprint(str(model))
        return
    with pytest.raises(weights.WeightsError, match=reason):
        weights.fingerprint(str(model))


def test_a_truncated_shard_is_said(model):
    os.truncate(model / "model-1.safetensors", 5000)
    with pytest.raises(weights.WeightsError, match=r"model-1\.safetensors is cut off"):
        weights.fingerprint(str(model))


def test_a_directory_without_a_model_is_said(tmp_path):
    with pytest.raises(weights.WeightsError, match="no weights"):
        weights.fingerprint(str(tmp_path))
    with pytest.raises(weights.WeightsError, match="No such file"):
        weights.fingerprint(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").symlink_to("/nowhere")
    with pytest.raises(weights.WeightsError, match="no weights"):
        weights.fingerprint(str(tmp_path))
