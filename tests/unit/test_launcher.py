"""The launcher with a stand-in for docker and for the lmcache server: only its own decisions are tested."""

import http.server
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import state as states
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import weights
from conftest import COLLECTION

LAUNCHER = COLLECTION / "roles/kvp_vllm/files/run-vllm-with-persist"


class Status(http.server.BaseHTTPRequestHandler):
    registered = []

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"registered_gpu_ids": self.registered}).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def lmcache():
    """Two ports that answer as the real server's do: /status, and ZMTP's greeting."""
    web = http.server.HTTPServer(("127.0.0.1", 0), Status)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    zmq = socket.create_server(("127.0.0.1", 0))

    def greet():
        while True:
            try:
                connection, _ = zmq.accept()
            except OSError:
                return
            connection.sendall(b"\xff")
            connection.close()

    threading.Thread(target=greet, daemon=True).start()
    yield {"host": "127.0.0.1", "port": zmq.getsockname()[1], "url": f"http://127.0.0.1:{web.server_port}"}
    web.shutdown()
    zmq.close()


@pytest.fixture
def launch(tmp_path):
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "json.dump({'argv': sys.argv[1:], 'secret': os.environ.get('SECRET')}, open(os.environ['OUT'], 'w'))\n"
    )
    docker.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights.bin").write_bytes(b"w" * 5000)
    pinned = weights.fingerprint(str(model))
    state = tmp_path / "state/vllm.json"
    state.parent.mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/kvpersist").symlink_to(COLLECTION / "plugins/module_utils/kvpersist")
    script = tmp_path / "launcher"
    text = LAUNCHER.read_text().replace("/usr/lib/kvpersist", str(tmp_path / "lib"))
    script.write_text(text.replace("state.RUN_DIR", repr(str(state.parent))))

    def systemctl(is_active):
        """A stand-in that notes what it is called with; lmcache is active, or not."""
        file = tmp_path / "bin/systemctl"
        file.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/systemctl\n[ "$1" != is-active ] || exit {int(not is_active)}\n'
        )
        file.chmod(0o755)
        called = tmp_path / "systemctl"
        called.write_text("")
        return lambda: [line for line in called.read_text().splitlines() if "is-active" not in line]

    systemctl(False)

    def run(lmcache, model_dir=model, wait=0, uncached_reason=""):
        config = {
            "model_dir": str(model_dir),
            "uncached_reason": uncached_reason,
            "weights_fingerprint": pinned,
            "lmcache": {**lmcache, "wait_seconds": wait},
            "kv_transfer_config": {"kv_connector": "LMCacheMPConnector", "text": "a 'b' \"c\" %d $e"},
            "docker_args": ["--rm", "--name", "x y"],
            "env": {"SECRET": "s3cret", "NUMBER": 1, "FLAG": True},
            "image": "image",
            "command": ["vllm", "serve"],
            "serve_args": ["name", "--port", 1],
        }
        path, out = tmp_path / "vllm.json", tmp_path / "out.json"
        path.write_text(json.dumps(config))
        env = {**os.environ, "PATH": f"{docker.parent}:{os.environ['PATH']}", "OUT": str(out)}
        done = subprocess.run(
            [sys.executable, str(script), str(path)], env=env, capture_output=True, text=True, timeout=60
        )
        called = json.loads(out.read_text()) if out.exists() else None
        return done, called, json.loads(state.read_text()) if state.exists() else None

    run.systemctl = systemctl
    return run


def test_with_the_server_there_the_connector_is_passed_word_by_word(launch, lmcache):
    done, called, state = launch(lmcache)
    assert done.returncode == 0
    assert called["argv"][:7] == ["run", "--rm", "--name", "x y", "--env", "SECRET", "--env"]
    at = called["argv"].index("--kv-transfer-config")
    assert json.loads(called["argv"][at + 1])["text"] == "a 'b' \"c\" %d $e"
    assert state["caching"] is True


def test_secrets_travel_in_the_environment(launch, lmcache):
    _done, called, _state = launch(lmcache)
    assert called["secret"] == "s3cret"
    assert "s3cret" not in json.dumps(called["argv"])


def test_without_the_server_it_serves_uncached_and_says_so(launch):
    gone = {"host": "127.0.0.1", "port": 1, "url": "http://127.0.0.1:1"}
    done, called, state = launch(gone, wait=2)
    assert done.returncode == 0
    assert called["argv"][-2:] == ["--port", "1"]
    assert "--kv-transfer-config" not in called["argv"]
    assert "SERVING UNCACHED" in done.stdout
    assert state["caching"] is False
    assert "refused" in state["reason"]


def test_a_server_that_accepts_and_never_answers_is_not_there(launch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        done, called, state = launch({"host": "127.0.0.1", "port": port, "url": f"http://127.0.0.1:{port}"})
    assert done.returncode == 0
    assert "--kv-transfer-config" not in called["argv"]
    assert state["caching"] is False


def test_a_server_that_holds_another_vllm_is_restarted(launch, lmcache, monkeypatch):
    """That one is gone, and its memory would be missing."""
    called = launch.systemctl(True)
    assert launch(lmcache)[2]["caching"] is True
    assert called() == []
    monkeypatch.setattr(Status, "registered", [7])
    assert launch(lmcache)[2]["caching"] is True
    assert called() == ["restart kvpersist-lmcache.service"]


@pytest.mark.parametrize(("is_active", "restarts"), [(True, ["restart kvpersist-lmcache.service"]), (False, [])])
def test_a_server_that_hangs_is_restarted_and_one_that_is_down_is_not(launch, is_active, restarts):
    called = launch.systemctl(is_active)
    _, _, state = launch({"host": "127.0.0.1", "port": 1, "url": "http://127.0.0.1:1"})
    assert state["caching"] is False
    assert called() == restarts


def test_a_server_that_is_something_else_is_not_there(launch, lmcache):
    """Whatever answers on the port, vLLM is started."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def nonsense():
            connection, _ = other.accept()
            connection.sendall(b"SSH-2.0-x\r\n")
            connection.close()

        threading.Thread(target=nonsense, daemon=True).start()
        done, called, state = launch({**lmcache, "url": f"http://127.0.0.1:{other.getsockname()[1]}"})
    assert done.returncode == 0, done.stderr
    assert called is not None
    assert state["caching"] is False


def test_a_missing_model_is_our_error_and_not_a_hub_lookup(launch, lmcache):
    done, called, _state = launch(lmcache, model_dir=pathlib.Path("/nowhere"))
    assert done.returncode == 78
    assert called is None
    assert "/nowhere/config.json" in done.stdout


def test_other_weights_are_served_uncached(launch, lmcache, tmp_path):
    """Swapped in place, under the same names and sizes."""
    launch(lmcache)
    (tmp_path / "model/weights.bin").write_bytes(b"W" * 5000)
    with_it = weights.fingerprint(str(tmp_path / "model"))
    config = json.loads((tmp_path / "vllm.json").read_text())
    assert with_it != config["weights_fingerprint"]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "launcher"), str(tmp_path / "vllm.json")],
        env={**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "OUT": str(tmp_path / "out.json")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--kv-transfer-config" not in json.loads((tmp_path / "out.json").read_text())["argv"]
    assert "SERVING UNCACHED: the weights in" in done.stdout
    state = json.loads((tmp_path / "state/vllm.json").read_text())
    assert state["caching"] is False
    assert with_it in state["reason"]
    metrics = (tmp_path / "state/kvpersist.prom").read_text()
    assert "kvp_serving_uncached 1\n" in metrics
    assert f"kvp_serving_uncached_since_seconds {state['since']}\n" in metrics


def test_what_is_uncertain_is_served_uncached_at_once(launch, lmcache):
    done, called, state = launch({**lmcache, "port": 1}, wait=60, uncached_reason="dtype is auto")
    assert done.returncode == 0
    assert "--kv-transfer-config" not in called["argv"]
    assert state["reason"] == "dtype is auto"


def test_what_the_gate_refused_is_served_uncached_at_the_second_start(launch, lmcache, tmp_path, monkeypatch):
    """And cached again at a third, or with other settings."""
    runs = tmp_path / "state"
    monkeypatch.setenv("INVOCATION_ID", "first")
    assert launch(lmcache)[2]["caching"] is True
    states.note_refusal("first", ["block_size: registered 64, pinned 128"], str(runs))
    monkeypatch.setenv("INVOCATION_ID", "second")
    state = launch(lmcache)[2]
    assert state["caching"] is False
    assert state["reason"] == "the gate refused the last start: block_size: registered 64, pinned 128"
    monkeypatch.setenv("INVOCATION_ID", "third")
    assert launch(lmcache)[2]["caching"] is True
    states.note_refusal("third", ["x"], str(runs))
    assert launch(lmcache, wait=1)[2]["caching"] is True
