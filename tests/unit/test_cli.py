"""kvp-admin on files of its own: exit codes and messages."""

import json

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import cli, state
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.identity import CacheIdentity, env_names
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.objects import ChunkKey, file_name
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.render import env_file
from conftest import COLLECTION
from test_identity import PINS

IDENTITY = CacheIdentity.from_fields(PINS)


@pytest.fixture
def admin(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_unit_states", lambda: dict.fromkeys(cli.UNITS, "active"))
    pins = {env_names()[name]: value for name, value in IDENTITY.items}
    named = {**pins, "KVP_NAMESPACE": IDENTITY.namespace(), "KVP_MODEL": IDENTITY.lmcache_model_name()}
    (tmp_path / "identity.env").write_text(env_file(named))
    (tmp_path / "cache.env").write_text("KVP_CACHE_ROOT=/nowhere\nKVP_L1_SIZE_GB=0.5\nKVP_L2_SIZE_GB=30\n")

    def run(*words):
        code = cli.main(["--config-dir", str(tmp_path), "--run-dir", str(tmp_path), *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    run.path = tmp_path
    return run


def test_status_of_a_host_that_caches(admin):
    state.write("vllm", {"caching": True, "reason": ""}, str(admin.path))
    state.write("gate", {"gate": "open", "reason": "", "differences": [], "model": "m"}, str(admin.path))
    code, out, _ = admin("status")
    assert (code, out.splitlines()[0]) == (0, "cached")
    code, out, _ = admin("status", "--json")
    assert json.loads(out)["caching"] is True


def test_status_says_each_reason(admin):
    code, out, _ = admin("status")
    assert code == 1
    assert "vLLM was never started" in out
    assert "the gate never ran" in out
    state.write("vllm", {"caching": False, "reason": "lmcache did not answer"}, str(admin.path))
    state.write(
        "gate", {"gate": "refused", "reason": "no", "differences": ["block_size: 1, 2"], "model": ""}, str(admin.path)
    )
    code, out, _ = admin("status")
    assert (code, out.splitlines()[0]) == (1, "UNCACHED")
    assert "vLLM serves uncached: lmcache did not answer" in out
    assert "problem    block_size: 1, 2" in out
    (admin.path / "identity.env").write_text("KVP_NAMESPACE=\nKVP_UNCACHED_REASON='dtype is auto'\n")
    assert "serving uncached on purpose: dtype is auto" in admin("status")[1]


def test_status_of_a_host_that_was_never_provisioned(admin):
    (admin.path / "identity.env").unlink()
    code, _, err = admin("status")
    assert (code, "provision this host" in err) == (2, True)


def test_odd_files_are_no_traceback(admin):
    for name in ("gate.json", "vllm.json"):
        for text in ("{}", '{"gate": "refused"}', '{"caching": true}', "[", "[" * 100000):
            (admin.path / name).write_text(text)
            assert admin("status")[0] == 1
    (admin.path / "deep.json").write_text("[" * 100000)
    assert admin("identity", "--fields", str(admin.path / "deep.json"))[0] == 2


def test_identity(admin):
    code, out, _ = admin("identity", "--json")
    assert (code, json.loads(out)["namespace"]) == (0, IDENTITY.namespace())
    path = admin.path / "identity.env"
    path.write_text(path.read_text().replace("KVP_BLOCK_SIZE=16", "KVP_BLOCK_SIZE=32"))
    code, _, err = admin("identity")
    assert (code, "identity.env was edited" in err) == (1, True)
    path.write_text(path.read_text().replace("KVP_DTYPE=bfloat16", "KVP_DTYPE=auto"))
    code, _, err = admin("identity")
    assert (code, err) == (2, 'kvp-admin: dtype is "auto"; allowed: one of bfloat16, float16, float32\n')


def test_published_vectors(admin):
    for vector in json.loads((COLLECTION / "docs/identity-vectors.json").read_text()):
        (admin.path / "fields.json").write_text(json.dumps(vector["fields"]))
        code, out, _ = admin("identity", "--json", "--fields", str(admin.path / "fields.json"))
        assert code == 0
        assert json.loads(out) == {key: vector[key] for key in ("namespace", "model", "canonical")}


def test_plan(admin):
    code, out, _ = admin("plan", "--tokens", "1000000")
    assert code == 0
    assert "64 layers, 8 KV heads, K 128 V 128: 65536 bytes per token and rank" in out
    assert "one chunk  256 tokens, 4 file(s) of 16777216 bytes" in out
    assert "1000000 tokens take 262.194 GB in 15628 files" in out
    assert "warning    the disk budget holds 114432 tokens" in out
    code, out, _ = admin("plan", "--budget", "1500", "--l1", "1000000", "--json")
    planned = json.loads(out)
    assert planned["l2_tokens"] == 5721856
    assert planned["warnings"][0].startswith("kvp_l1_size_gb is 1e+06 GiB, but the host has")


def chunk(model, number=1):
    return ChunkKey(model, number.to_bytes(32, "big"), 0x01000100)


@pytest.fixture
def cache(admin):
    """A cache root with one live and one dead chunk, and something that is neither."""
    root = admin.path / "root"
    root.mkdir()
    (admin.path / "cache.env").write_text(f"KVP_CACHE_ROOT={root}\nKVP_L2_SIZE_GB=0.00001\n")
    for model in (IDENTITY.lmcache_model_name(), "old-kvp-1"):
        (root / file_name(chunk(model))).write_bytes(b"x" * 8192)
    (root / "notes.txt").write_text("mine")
    return root


def test_report(admin, cache):
    code, out, _ = admin("report")
    assert code == 0
    assert f"live  {IDENTITY.lmcache_model_name()}" in out
    assert "DEAD  old-kvp-1" in out
    assert json.loads(admin("report", "--json")[1])["namespaces"]["old-kvp-1"]["objects"] == 1


def test_cleanup_lists_and_then_removes(admin, cache):
    before = set(cache.iterdir())
    code, out, _ = admin("cleanup", "--dead")
    assert (code, "would be removed (nothing was; add --apply)" in out) == (0, True)
    assert set(cache.iterdir()) == before
    code, out, _ = admin("cleanup", "--dead", "--apply", "--json")
    assert json.loads(out)["files"] == [{"name": file_name(chunk("old-kvp-1")), "bytes": 8192}]
    assert len(set(cache.iterdir())) == 2
    assert admin("cleanup", "--dead", "--apply")[1].startswith("0 files")


def test_cleanup_of_one_namespace_by_its_short_name(admin, cache):
    code, out, _ = admin("cleanup", "--namespace", IDENTITY.namespace(), "--apply")
    assert code == 0
    assert sorted(path.name for path in cache.iterdir()) == ["notes.txt", file_name(chunk("old-kvp-1"))]
    code, _, err = admin("cleanup", "--namespace", "nobody")
    assert (code, "--namespace is nobody; allowed: old-kvp-1" in err) == (2, True)


def test_cleanup_to_the_budget(admin, cache):
    code, out, _ = admin("cleanup", "--to-budget", "0.000013", "--apply")
    assert (code, "1 files" in out) == (0, True)
    assert not (cache / file_name(chunk("old-kvp-1"))).exists()


def test_a_root_that_is_not_there(admin):
    for command in ("report", "cleanup"):
        code, _, err = admin(command)
        assert (code, "/nowhere is no directory" in err) == (2, True)


@pytest.mark.parametrize("words", [["cleanup", "--older-than", "5"], ["cleanup", "--to-budget", "0"]])
def test_wrong_use_of_cleanup(admin, words):
    with pytest.raises(SystemExit) as end:
        admin(*words)
    assert end.value.code == 2


@pytest.mark.parametrize("words", [["plan", "--budget", "-1"], ["plan", "--tokens", "x"], ["nothing"], []])
def test_wrong_use(admin, words):
    with pytest.raises(SystemExit) as end:
        admin(*words)
    assert end.value.code == 2
