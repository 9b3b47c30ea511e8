"""The filters through Ansible's own templating, by their long and by their short names."""

import json
import os
import subprocess
import sys

import pytest
from conftest import REPO
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
              'l2': '/kv' | sikkatu.kvpersist.kvp_l2_adapter(4) | from_json,
              'kv': '::1' | sikkatu.kvpersist.kvp_kv_transfer(5555) | from_json} | to_json }}
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
