"""The example inventory: refused until every placeholder is replaced, and complete once they are."""

import shutil
import subprocess
import sys

import yaml
from conftest import REPO
from test_filters import ansible_env

PLACEHOLDERS = {
    "ansible_host": "localhost",
    "kvp_storage_device": "/dev/disk/by-id/none",
    "kvp_vllm_image": "lmcache/vllm-openai@sha256:" + "0" * 64,
    "kvp_identity_vllm_version": "0.32.0",
    "kvp_identity_vllm_commit": "none",
    "kvp_identity_lmcache_commit": "none",
    "kvp_identity_model_revision": "0" * 40,
    "kvp_identity_weights_fingerprint": "0" * 64,
    "kvp_identity_chat_template_sha256": "0" * 64,
    "kvp_identity_kv_groups": [{"layers": 1, "kv_heads": 8, "k_head_dim": 192, "v_head_dim": 128, "window": 128}],
}


def site(inventory, *arguments):
    command = [sys.executable, "-m", "ansible", "playbook", "-i", str(inventory), "playbooks/site.yml", *arguments]
    env = {**ansible_env(), "ANSIBLE_NOCOLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=REPO, check=False)


def test_placeholders_are_refused_together_by_name():
    run = site(REPO / "inventories/example")
    assert run.returncode == 2
    told = " ".join(run.stdout.split())
    assert (
        "Still REPLACE_ME in your inventory: " + ", ".join(sorted([*PLACEHOLDERS, "kvp_identity_tokenizer_revision"]))
        in told
    )
    assert "UNREACHABLE" not in told


def test_once_replaced_each_model_has_its_namespace(tmp_path):
    """Up to the first task that needs the VM itself."""
    inventory = tmp_path / "example"
    shutil.copytree(REPO / "inventories/example", inventory)
    (inventory / "host_vars").mkdir()
    values = {**PLACEHOLDERS, "ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (inventory / "host_vars/gpu-vm-1.yml").write_text(yaml.safe_dump({**values, "kvp_l1_size_gb": 0.5}))
    for model, other in (("mimo_v2_6_pro", "qwen3_32b"), ("qwen3_32b", "mimo_v2_6_pro")):
        groups = {model: {"hosts": {"gpu-vm-1": None}}, other: {"hosts": {}}}
        (inventory / "hosts.yml").write_text(yaml.safe_dump({"kvpersist": {"children": groups}}))
        run = site(inventory, "--tags", "identity", "--check", "-e", "ansible_become=false")
        assert run.returncode == 0, run.stdout + run.stderr
