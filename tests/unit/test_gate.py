"""The gate: opens for the pinned vLLM alone, names the field, and a refusal stands until it is cured."""

import copy
import errno
import http.server
import json
import socket
import subprocess
import threading

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import gate, state
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.identity import CacheIdentity, env_names
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.render import env_file
from test_identity import PINS

GROUP = {"layers": 30, "kv_heads": 3, "k_head_dim": 64, "v_head_dim": 64}
FIELDS = {
    **PINS,
    "kv_groups": [GROUP],
    "tensor_parallel_size": 1,
    "kv_cache_dtype": "float32",
    "dtype": "float32",
    "block_size": 128,
}
IDENTITY = CacheIdentity.from_fields(FIELDS)
#: As the real lmcache server 0.5.6 showed it for SmolLM2-135M in float32.
REGISTERED = {
    "model_name": IDENTITY.lmcache_model_name(),
    "world_size": 1,
    "kv_cache_layout": {
        "num_layers": 30,
        "num_blocks": 128,
        "cache_size_per_token": 46080,
        "kernel_groups": [
            {
                "kernel_group_idx": 0,
                "engine_group_idx": 0,
                "object_group_idx": 0,
                "num_layers": 30,
                "layer_indices": list(range(30)),
                "tokens_per_block": 128,
                "slots_per_block": 128,
                "dtype": "torch.float32",
                "engine_kv_concrete_shape": "Unknown (EngineKVFormat.NL_X_NB_NH_BS_CS)",
                "is_mla": False,
                "engine_kv_format": "NL_X_NB_NH_BS_CS",
            }
        ],
    },
}


def status(**changes):
    """/status with one registration; ``a__b`` changes b inside a of the registration."""
    context = copy.deepcopy(REGISTERED)
    document = {"chunk_size": 256, "hash_algorithm": "blake3", "cache_context_meta": {"1": context}}
    for name, value in changes.items():
        if name in document:
            document[name] = value
        elif name in context:
            context[name] = value
        elif name in context["kv_cache_layout"]:
            context["kv_cache_layout"][name] = value
        else:
            context["kv_cache_layout"]["kernel_groups"][0][name] = value
    return document


def test_agreement():
    assert gate.differences(IDENTITY, status()) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens_per_block": 64}, "block_size: registered 64, pinned 128"),
        ({"dtype": "torch.bfloat16"}, "kv_cache_dtype: registered torch.bfloat16, pinned torch.float32"),
        ({"num_layers": 29}, "kv_groups (layers): registered 29, pinned 30"),
        ({"cache_size_per_token": 1}, "kv_groups (bytes per token): registered 1, pinned 46080"),
        ({"world_size": 4}, "world_size: registered 4, pinned 1"),
        ({"chunk_size": 512}, "chunk_size: registered 512, pinned 256"),
        ({"hash_algorithm": "builtin"}, "hash_algorithm: registered builtin, pinned blake3"),
        ({"model_name": f"{IDENTITY.lmcache_model_name()}##lmcache-dcp-layout-v1-d2-interleave8"}, "model_name:"),
        ({"kv_cache_layout": {}}, "status: the lmcache server does not tell"),
        ({"kernel_groups": []}, "status: the lmcache server tells no kernel groups"),
    ],
)
def test_disagreement_names_the_field(changes, told):
    assert [line for line in gate.differences(IDENTITY, status(**changes)) if line.startswith(told)]


def test_one_wrong_registration_among_right_ones_is_refused():
    document = status()
    wrong = copy.deepcopy(REGISTERED)
    wrong["kv_cache_layout"]["kernel_groups"][0]["tokens_per_block"] = 64
    document["cache_context_meta"]["2"] = wrong
    assert gate.differences(IDENTITY, document) == ["block_size: registered 64, pinned 128"]


def test_other_ways_to_split():
    four = CacheIdentity.from_fields({**FIELDS, "kv_groups": [{**GROUP, "kv_heads": 8}], "tensor_parallel_size": 4})
    document = status(model_name=four.lmcache_model_name(), world_size=4, cache_size_per_token=30 * 2 * 128 * 4)
    assert gate.differences(four, document) == []
    mla = {"layers": 30, "kv_heads": 1, "k_head_dim": 576, "v_head_dim": 0, "mla": True}
    shared = CacheIdentity.from_fields(
        {**FIELDS, "kv_groups": [mla], "tensor_parallel_size": 4, "decode_context_parallel_size": 2}
    )
    document = status(model_name=shared.lmcache_model_name(), world_size=2, tokens_per_block=256)
    assert gate.differences(shared, document) == []
    fp8 = CacheIdentity.from_fields({**FIELDS, "kv_cache_dtype": "fp8"})
    document = status(model_name=fp8.lmcache_model_name(), dtype="torch.uint8", cache_size_per_token=46080 // 4)
    assert gate.differences(fp8, document) == []


class Server(http.server.BaseHTTPRequestHandler):
    answer = None

    def do_GET(self):
        body = json.dumps(type(self).answer).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A gate with files of its own, a stand-in for /status, and a note of what it stopped."""
    stopped = []

    def run(command, **_):
        if command[1] == "show":
            return subprocess.CompletedProcess(command, 0, "ActiveState=activating\nInvocationID=abc\n")
        return stopped.append(command)

    monkeypatch.setattr(gate.subprocess, "run", run)
    web = http.server.HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    for name in ("etc", "run", "cache"):
        (tmp_path / name).mkdir()
    config = {"lmcache_url": f"http://127.0.0.1:{web.server_port}", "cache_root": str(tmp_path / "cache")}
    (tmp_path / "etc/gate.json").write_text(json.dumps(config))

    def pin(**changes):
        identity = CacheIdentity.from_fields({**FIELDS, **changes})
        pins = {env_names()[name]: value for name, value in identity.items}
        text = env_file({**pins, "KVP_NAMESPACE": identity.namespace(), "KVP_MODEL": identity.lmcache_model_name()})
        (tmp_path / "etc/identity.env").write_text("# pins\n" + text)

    pin()
    watch = gate.Gate(str(tmp_path / "etc"), str(tmp_path / "run"))

    def step(answer):
        Server.answer = answer
        watch.step()
        return state.read("gate", str(tmp_path / "run"))

    step.stopped, step.path, step.pin, step.watch = stopped, tmp_path, pin, watch
    yield step
    web.shutdown()


STOPPED = [["systemctl", "stop", "--no-block", "kvpersist-lmcache.service"]]
NOBODY = {"chunk_size": 256, "hash_algorithm": "blake3", "cache_context_meta": {}}


def test_opens_and_writes_the_manifest(host):
    assert host(NOBODY)["gate"] == "closed"
    assert host(status())["gate"] == "open"
    manifest = json.loads((host.path / f"cache/{IDENTITY.namespace()}.json").read_text())
    assert manifest["identity"]["block_size"] == 128
    assert manifest["registered"][0]["kernel_groups"][0]["engine_kv_format"] == "NL_X_NB_NH_BS_CS"
    assert host(status(num_blocks=7))["gate"] == "open"
    assert host.stopped == []
    metrics = (host.path / "run/kvpersist.prom").read_text()
    assert "kvp_gate_open 1\n" in metrics


def test_refuses_stops_the_server_and_stays_until_cured(host):
    host(status())
    refused = host(status(tokens_per_block=64))
    assert (refused["gate"], refused["differences"]) == ("refused", ["block_size: registered 64, pinned 128"])
    assert host.stopped == STOPPED
    assert state.refusal("abc", str(host.path / "run")) == "block_size: registered 64, pinned 128"
    assert state.refusal("", str(host.path / "run")) is state.refusal("other", str(host.path / "run")) is None
    assert "kvp_gate_refused 1\n" in (host.path / "run/kvpersist.prom").read_text()
    assert host("not a status")["gate"] == "refused"  # the server is down, and that is why
    assert host.stopped == STOPPED
    assert host(status(tokens_per_block=64))["gate"] == "refused"  # started again with the same vLLM
    assert host.stopped == STOPPED * 2
    again = gate.Gate(host.watch.config_dir, host.watch.run_dir)  # the gate itself was restarted
    Server.answer = "not a status"
    assert again.look()["gate"] == "refused"
    assert host(NOBODY)["gate"] == "closed"
    assert host(status())["gate"] == "open"


def test_a_layout_that_changed_under_the_same_pins_is_refused(host):
    host(status())
    refused = host(status(engine_kv_format="NL_X_TWO_NB_BS_NH_HS"))
    assert refused["gate"] == "refused"
    assert refused["differences"][0].startswith("manifest (registered): now ")


def test_a_manifest_of_something_else_is_refused(host):
    path = host.path / f"cache/{IDENTITY.namespace()}.json"
    path.write_text("{")
    assert host(status())["differences"][0].startswith("manifest: ")
    path.write_text(json.dumps({"namespace": IDENTITY.namespace()}))
    assert "manifest (identity)" in " ".join(host(status())["differences"])


def test_an_edited_identity_is_refused(host):
    path = host.path / "etc/identity.env"
    path.write_text(path.read_text().replace("KVP_BLOCK_SIZE=128", "KVP_BLOCK_SIZE=64"))
    assert "namespace: not that of the fields beside it" in host(status())["differences"]
    path.write_text("KVP_NAMESPACE=\nKVP_UNCACHED_REASON='no weights'\n")
    assert host(status())["reason"] == "no weights"
    path.unlink()
    assert host(status())["gate"] == "closed"


@pytest.mark.parametrize(
    "old, new", [("KVP_DTYPE=float32", "KVP_DTYPE=auto"), ("KVP_DTYPE=float32\n", ""), ("# pins", "x")]
)
def test_pins_that_cannot_be_read_are_refused(host, old, new):
    path = host.path / "etc/identity.env"
    path.write_text(path.read_text().replace(old, new))
    assert host(status())["gate"] == "refused"
    assert host.stopped == STOPPED


def test_what_it_cannot_judge_is_refused(host):
    (host.path / f"cache/{IDENTITY.namespace()}.json").mkdir()
    assert host(status())["gate"] == "refused"
    (host.path / f"cache/{IDENTITY.namespace()}.json").rmdir()
    assert host(status())["gate"] == "open"
    document = status()
    document["cache_context_meta"]["2"] = None
    assert host(document)["gate"] == "open"
    (host.path / "cache").rename(host.path / "gone")
    assert host(status())["gate"] == "refused"


def test_a_full_disk_closes_and_does_not_refuse(host, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(gate, "check_manifest", full)
        assert host(status())["gate"] == "closed"
    assert host.stopped == []
    assert host(status())["gate"] == "open"


def test_a_disk_that_fails_closes_and_does_not_refuse(host, monkeypatch):
    """It says nothing about the vLLM that registered, and the next start of that may use the cache."""

    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    host(status())
    with monkeypatch.context() as patch:
        patch.setattr(json, "load", fails)
        with pytest.raises(OSError, match="Input/output"):
            gate.check_manifest(str(host.path / f"cache/{IDENTITY.namespace()}.json"), {})
    with monkeypatch.context() as patch:
        patch.setattr(gate, "check_manifest", fails)
        closed = host(status())
    assert (closed["gate"], "the cache's disk fails: Input/output error" in closed["reason"]) == ("closed", True)
    assert host.stopped == []
    assert host(status())["gate"] == "open"


def test_an_open_gate_takes_back_what_it_refused(host):
    host(status(tokens_per_block=64))
    assert state.refusal("abc", str(host.path / "run"))
    assert host(status())["gate"] == "open"
    assert state.refusal("abc", str(host.path / "run")) is None


def test_a_server_that_hangs_while_vllm_is_connected_is_refused(host):
    host(status())
    Server.answer = []
    for _ in range(gate.UNANSWERED_LOOKS - 1):
        host.watch.step(frozenset({"vllm"}))
    assert host.watch.shown["gate"] == "closed"
    host.watch.step(frozenset({"vllm"}))
    assert host.watch.shown["gate"] == "refused"


def test_a_server_that_is_busy_changes_nothing_for_the_vllm_that_was_judged(host):
    Server.answer = status()
    host.watch.step(frozenset({"vllm"}))
    assert (host.watch.shown["gate"], host.watch.shown["model"]) == ("open", IDENTITY.lmcache_model_name())
    Server.answer = []
    host.watch.step(frozenset({"vllm"}))
    assert host.watch.shown["gate"] == "open"
    host.watch.step(frozenset({"vllm", "another"}))
    assert (host.watch.shown["gate"], host.watch.shown["model"]) == ("closed", "")


def test_a_server_that_restarts_is_not(host):
    """Down for long, and then connected before it answers."""
    host(status())
    Server.answer = []
    for _ in range(gate.UNANSWERED_LOOKS * 2):
        host.watch.step()
    for _ in range(gate.UNANSWERED_LOOKS - 1):
        host.watch.step(frozenset({"vllm"}))
    assert host.watch.shown["gate"] == "closed"
    assert host.stopped == []
    assert host(status())["gate"] == "open"


def test_a_server_that_is_down_is_not(host):
    for _ in range(gate.UNANSWERED_LOOKS * 2):
        assert host("nothing")["gate"] == "closed"
    assert host.stopped == []


def test_all_ranks_have_to_be_there(host):
    host.pin(kv_groups=[{**GROUP, "layers": 61, "kv_heads": 4}], pipeline_parallel_size=2)
    name = CacheIdentity.from_fields(
        {**FIELDS, "kv_groups": [{**GROUP, "layers": 61, "kv_heads": 4}], "pipeline_parallel_size": 2}
    ).lmcache_model_name()
    first, second = (copy.deepcopy(REGISTERED) for _ in range(2))
    for context, layers in ((first, 31), (second, 30)):
        context.update(model_name=name, world_size=2)
        context["kv_cache_layout"]["num_layers"] = layers
    document = {"chunk_size": 256, "hash_algorithm": "blake3", "cache_context_meta": {"1": first}}
    assert host(document)["reason"] == "1 of 2 ranks are registered"
    document["cache_context_meta"]["2"] = second
    assert host(document)["gate"] == "open"
    assert host(document)["gate"] == "open"


def test_odd_state_files_are_as_good_as_none(host, tmp_path):
    for text in ("{}", "[]", "{", '{"gate": "open"}', "[" * 100000):
        (host.path / "run/gate.json").write_text(text)
        assert gate.Gate(host.watch.config_dir, host.watch.run_dir).shown is None
    assert host(status())["gate"] == "open"


@pytest.mark.parametrize(("before", "after"), [("open", "closed"), ("closed", "closed"), ("refused", "refused")])
def test_a_gate_that_was_stopped_is_closed(tmp_path, monkeypatch, before, after):
    """But a refusal stands: it is why the server is down."""
    monkeypatch.setattr(gate.state, "RUN_DIR", str(tmp_path))
    state.write("gate", {"gate": before, "reason": "", "differences": [], "model": ""}, str(tmp_path))
    gate.main(["stopped"])
    assert state.read("gate", str(tmp_path))["gate"] == after


def test_another_model_is_another_gate(host):
    assert host(status())["gate"] == "open"
    host.pin(chunk_size=512)
    assert host(status())["gate"] == "closed"
    assert host.stopped == []


def test_only_changes_are_written(host):
    since = host(status())
    path = host.path / "run/gate.json"
    before = path.stat().st_mtime_ns
    assert host(status()) == since
    assert path.stat().st_mtime_ns == before


def test_it_looks_often_after_a_change_and_rarely_otherwise():
    pace, looks = gate.Pace(), []
    for tick in range(1000):
        now = tick / 2
        seen = frozenset({"a"} if now >= 200 else ())
        if pace.due(now, seen):
            looks.append(now)
    awake = [look for look in looks if look < 60 or 200 <= look < 260]
    assert len(awake) == 120
    assert 200.0 in looks
    assert len(looks) - len(awake) <= 10


def test_connections_of_the_kernel(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert gate.connections(port) == frozenset()
        with socket.create_connection(server.getsockname()):
            assert len(gate.connections(port)) == 1
    assert gate.connections(port, [str(tmp_path / "none")]) == frozenset()
