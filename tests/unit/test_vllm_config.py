"""vllm.json, rendered by Ansible from the roles' own files: what docker and vLLM will be told."""

import json
import subprocess
import sys

import yaml
from conftest import COLLECTION, REPO
from test_filters import ansible_env
from test_identity import PINS

ROLES = COLLECTION / "roles"
FILES = [
    f"{ROLES}/{role}/{kind}/main.yml" for role in ("kvp", "kvp_identity", "kvp_vllm") for kind in ("defaults", "vars")
]


def render(tmp_path, **variables):
    play = {
        "hosts": "localhost",
        "gather_facts": False,
        "vars_files": FILES,
        "tasks": [
            {
                "ansible.builtin.set_fact": {
                    "kvp_identity_model_name": "{{ __kvp_identity_fields | sikkatu.kvpersist.kvp_model_name }}",
                    "kvp_identity_doubts": [],
                }
            },
            {
                "ansible.builtin.template": {
                    "src": f"{ROLES}/kvp_vllm/templates/vllm.json.j2",
                    "dest": f"{tmp_path}/vllm.json",
                    "mode": "0600",
                }
            },
        ],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    pins = {f"kvp_identity_{name}": value for name, value in PINS.items() if name != "store_format"}
    given = {**pins, "kvp_vllm_image": "image@sha256:1", "kvp_vllm_model_dir": "/srv/models/x", **variables}
    command = [sys.executable, "-m", "ansible", "playbook", f"{tmp_path}/play.yml", "-e", json.dumps(given)]
    run = subprocess.run(command, capture_output=True, text=True, env=ansible_env(), cwd=REPO, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads((tmp_path / "vllm.json").read_text())


def doubts(tmp_path, **variables):
    """What kvp_identity holds against caching, before any image is asked."""
    task = {"ansible.builtin.copy": {"content": "{{ __kvp_identity_doubts | to_json }}", "dest": f"{tmp_path}/d.json"}}
    play = {"hosts": "localhost", "gather_facts": False, "vars_files": FILES, "tasks": [task]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    pins = {f"kvp_identity_{name}": value for name, value in PINS.items() if name != "store_format"}
    command = [
        sys.executable,
        "-m",
        "ansible",
        "playbook",
        f"{tmp_path}/play.yml",
        "-e",
        json.dumps({**pins, **variables}),
    ]
    run = subprocess.run(command, capture_output=True, text=True, env=ansible_env(), cwd=REPO, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads((tmp_path / "d.json").read_text())


def test_what_the_container_is_given_is_vetted(tmp_path):
    assert doubts(tmp_path) == []
    (command,) = doubts(tmp_path, kvp_vllm_command=["sh", "-c", "vllm serve"])
    assert command.startswith('kvp_vllm_command is ["sh", "-c", "vllm serve"]; allowed')
    (variable,) = doubts(tmp_path, kvp_vllm_docker_args=["-ie", "VLLM_KV_CACHE_LAYOUT=HND"])
    assert variable.startswith("VLLM_KV_CACHE_LAYOUT in the environment")
    assert len(doubts(tmp_path, kvp_vllm_env={"PYTHONPATH": "/x"}, kvp_vllm_extra_args=["--enable-lora"])) == 2


def value(arguments, option):
    return arguments[arguments.index(option) + 1]


def test_four_gpus(tmp_path):
    config = render(tmp_path)
    assert value(config["docker_args"], "--gpus") == "all"
    assert value(config["docker_args"], "--ipc") == "host"
    assert "memlock=-1" in config["docker_args"]
    assert value(config["serve_args"], "--tensor-parallel-size") == "4"
    assert value(config["serve_args"], "--kv-cache-dtype") == "bfloat16"
    assert value(config["serve_args"], "--block-size") == "16"
    assert value(config["serve_args"], "--served-model-name") == PINS["model_id"]
    assert config["serve_args"][0].startswith("qwen3-32b-kvp-")
    assert config["kv_transfer_config"]["kv_connector"] == "LMCacheMPConnector"
    assert config["env"]["HF_HUB_OFFLINE"] == "1"


def test_a_host_without_gpus(tmp_path):
    config = render(tmp_path, kvp_vllm_gpus="", kvp_identity_dtype="float32", kvp_identity_kv_cache_dtype="float32")
    assert "--gpus" not in config["docker_args"]
    assert "memlock=-1" not in config["docker_args"]
    assert "--kv-cache-dtype" not in config["serve_args"]


def test_secrets_are_mounted_and_the_key_is_asked_for_everywhere(tmp_path):
    without, mounted = render(tmp_path), "/run/kvpersist/{0}:/run/kvpersist/{0}:ro"
    assert "--middleware" not in without["serve_args"]
    assert not [word for word in without["docker_args"] if "/run/kvpersist" in word]
    config = render(tmp_path, kvp_vllm_api_key_file="/root/key", kvp_vllm_hf_token_file="/root/token")
    assert value(config["serve_args"], "--middleware") == "kvpersist_key.KeyForEverything"
    for name in ("api-key", "hf-token"):
        at = config["docker_args"].index(mounted.format(name))
        assert config["docker_args"][at - 1] == "--volume"


def test_a_stop_drains_unless_told_otherwise(tmp_path):
    assert value(render(tmp_path)["serve_args"], "--shutdown-timeout") == "15"
    assert "--shutdown-timeout" not in render(tmp_path, kvp_vllm_drain_timeout="0")["serve_args"]


def test_a_hub_snapshot_is_mounted_with_the_blobs_it_links_to(tmp_path):
    hub = "/srv/hub/models--Qwen--Qwen3-32B"
    config = render(tmp_path, kvp_vllm_model_dir=f"{hub}/snapshots/{'a' * 40}")
    assert f"{hub}:/kvpersist/model:ro" in config["docker_args"]


def test_hard_values_arrive_as_they_are(tmp_path):
    hard = ['{"a": "b c"}', "it's $HOME %n \\ {x}", "模型"]
    config = render(tmp_path, kvp_vllm_extra_args=hard, kvp_vllm_env={"X": hard[1]})
    assert config["serve_args"][-3:] == hard
    assert config["env"]["X"] == hard[1]
