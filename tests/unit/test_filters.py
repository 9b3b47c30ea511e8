"""The filters through Ansible's own templating, by their long and by their short names."""

import json
import os
import subprocess
import sys

import pytest
from conftest import COLLECTION, REPO
from test_identity import PINS

PLAYBOOK = """
- hosts: localhost
  gather_facts: false
  connection: local
  tasks:
    - name: Render with each name
      ansible.builtin.copy:
        dest: "{{ out }}"
        mode: "0600"
        content: >-
          {{ {'long': pins | sikkatu.kvpersist.kvp_namespace, 'short': pins | kvp_namespace,
              'model': pins | sikkatu.kvpersist.kvp_model_name,
              'chunk': (pins | sikkatu.kvpersist.kvp_identity).chunk_size,
              'env': {'A': 'x y'} | sikkatu.kvpersist.kvp_env_file,
              'l2': '/kv' | sikkatu.kvpersist.kvp_l2_adapter(4, adapter='nixl_store_dynamic') | from_json,
              'kv': '::1' | sikkatu.kvpersist.kvp_kv_transfer(5555) | from_json} | to_json }}
"""

VECTORS = """
- hosts: localhost
  gather_facts: false
  connection: local
  tasks:
    - name: Compute all of them
      ansible.builtin.copy:
        dest: "{{ out }}"
        mode: "0600"
        content: >-
          {{ vectors | map(attribute='fields') | map('sikkatu.kvpersist.kvp_namespace')
             | zip(vectors | map(attribute='fields') | map('sikkatu.kvpersist.kvp_model_name')) | list | to_json }}
"""


def ansible_env():
    return {
        **os.environ,
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
        "ANSIBLE_LOCALHOST_WARNING": "false",
        "ANSIBLE_COLLECTIONS_PATH": str(REPO / "collections"),
    }


def play(tmp_path, pins):
    playbook, out = tmp_path / "play.yml", tmp_path / "out.json"
    playbook.write_text(PLAYBOOK)
    command = [sys.executable, "-m", "ansible", "playbook", str(playbook)]
    command += ["-e", json.dumps({"pins": pins, "out": str(out)})]
    run = subprocess.run(command, capture_output=True, text=True, env=ansible_env(), cwd=REPO, check=False)
    return run, json.loads(out.read_text()) if out.exists() else None


def test_rendered_in_a_play(tmp_path):
    run, result = play(tmp_path, PINS)
    assert run.returncode == 0, run.stdout + run.stderr
    assert result["long"] == result["short"]
    assert result["model"].endswith(result["long"])
    assert result["chunk"] == 256
    assert result["env"] == "A='x y'\n"
    assert result["l2"]["backend_params"]["max_capacity_gb"] == "3.725"
    assert result["kv"]["kv_connector_extra_config"]["lmcache.mp.host"] == "tcp://[::1]"


@pytest.mark.parametrize(("field", "value"), [("model_revision", "main"), ("dtype", "auto")])
def test_a_refusal_fails_the_play_with_the_field(tmp_path, field, value):
    run, result = play(tmp_path, {**PINS, field: value})
    assert run.returncode != 0
    assert result is None
    assert f'{field} is "{value}"' in (run.stdout + run.stderr).replace("\\", "").replace("\n", " ")


def test_published_vectors(tmp_path):
    """Through Ansible's templating, whose values are not quite Python's own."""
    vectors = json.loads((COLLECTION / "docs/identity-vectors.json").read_text())
    (tmp_path / "play.yml").write_text(VECTORS)
    command = [sys.executable, "-m", "ansible", "playbook", f"{tmp_path}/play.yml"]
    command += ["-e", json.dumps({"vectors": vectors, "out": f"{tmp_path}/out.json"})]
    subprocess.run(command, capture_output=True, text=True, env=ansible_env(), cwd=REPO, check=True)
    expected = [[vector["namespace"], vector["model"]] for vector in vectors]
    assert json.loads((tmp_path / "out.json").read_text()) == expected


def test_doubts_and_arguments(tmp_path):
    play = """
- hosts: localhost
  gather_facts: false
  connection: local
  tasks:
    - ansible.builtin.copy:
        dest: "{{ out }}"
        mode: "0600"
        content: >-
          {{ {'none': pins | sikkatu.kvpersist.kvp_doubts(['--seed', 1], ['PATH']),
              'some': pins | combine({'dtype': ''}) | sikkatu.kvpersist.kvp_doubts(['--enable-lora'], ['VLLM_X']),
              'partial': (pins | combine({'dtype': ''}) | sikkatu.kvpersist.kvp_identity(partial=true)).keys() | list,
              'args': pins | combine({'hf_overrides': {'a': 1.0}, 'quantization': 'fp8'})
                      | sikkatu.kvpersist.kvp_identity | sikkatu.kvpersist.kvp_serve_args} | to_json }}
"""
    (tmp_path / "play.yml").write_text(play)
    command = [sys.executable, "-m", "ansible", "playbook", f"{tmp_path}/play.yml"]
    command += ["-e", json.dumps({"pins": PINS, "out": f"{tmp_path}/out.json"})]
    run = subprocess.run(command, capture_output=True, text=True, env=ansible_env(), cwd=REPO, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    out = json.loads((tmp_path / "out.json").read_text())
    assert out["none"] == []
    assert [doubt.split(" ")[0] for doubt in out["some"]] == ["dtype", "--enable-lora", "VLLM_X"]
    assert set(PINS) - set(out["partial"]) == {"dtype"}
    assert out["args"] == [
        *("--dtype", "bfloat16", "--quantization", "fp8", "--hf-overrides", '{"a":1}', "--kv-cache-dtype", "bfloat16"),
        *("--block-size", "16", "--max-model-len", "131072", "--tensor-parallel-size", "4"),
        *("--pipeline-parallel-size", "1", "--decode-context-parallel-size", "1"),
    ]
