"""Fixtures of the scenario: site.yml with the pins of a model, and vLLM started by hand as without this product."""

import json
import pathlib
import secrets
import sys

import pytest
import yaml

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/hosts"))

from play import Play, journal_of_what_failed, told  # noqa: E402  (the path above comes first)

CONFIG = "/root/by-hand.json"
MODEL_ONLY = ("--tags", "identity,vllm,verify")


@pytest.fixture
def play(host):
    return Play(host, host.backend.host)


@pytest.fixture
def identify(play, tmp_path):
    """The pins that identify.yml finds for a model."""

    def run(**variables):
        file = tmp_path / f"pins-{len(list(tmp_path.iterdir()))}.yml"
        code, output = play.book("identify.yml", kvp_identity_file=str(file), **variables)
        assert code == 0, output
        return yaml.safe_load(file.read_text())

    return run


@pytest.fixture
def deploy(play):
    """site.yml with these pins, which have to be accepted; `*MODEL_ONLY` for what depends on them alone."""

    def run(*arguments, **variables):
        code, output = play.site(*arguments, **variables)
        assert code == 0, told(output)
        return told(output)

    return run


START = """
import json, sys
sys.path.insert(0, "/usr/lib/kvpersist")
from kvpersist import weights
name, model, options = json.loads(sys.argv[1])
config = json.load(open("/etc/kvpersist/vllm.json"))
mounted = config["model_dir"] + ":/kvpersist/model:ro"
config["docker_args"] = [a.replace(mounted, model + ":/kvpersist/model:ro") for a in config["docker_args"]]
config["model_dir"], config["weights_fingerprint"] = model, weights.fingerprint(model)
arguments = config["serve_args"]
arguments[0] = name
for option, value in options.items():
    arguments[arguments.index(option) + 1] = value
json.dump(config, open(sys.argv[2], "w"))
"""


@pytest.fixture
def by_hand(host):
    """Start vLLM with a --model string of one's own choice, with nothing checked."""

    def stop():
        host.run("systemctl stop by-hand kvpersist-vllm; docker rm -f tiny-kvp; systemctl reset-failed by-hand")
        host.check_output("find /dev/shm -name 'lmcache_kv_*' -delete")

    def start(name, model, **options):
        stop()
        words = {f"--{key.replace('_', '-')}": str(value) for key, value in options.items()}
        host.check_output("python3 -c %s %s %s", START, json.dumps([name, model, words]), CONFIG)
        host.check_output("ln -sfn /kvpersist/model /etc/kvpersist/models/%s", name)
        host.check_output(
            "systemctl start kvpersist-lmcache;"
            f" systemd-run --unit by-hand /usr/lib/kvpersist/run-vllm-with-persist {CONFIG}"
        )
        host.check_output("/usr/lib/kvpersist/wait-ready 120 $$ http://127.0.0.1:8000/health")

    yield start
    stop()


@pytest.fixture
def ask(play):
    """(answer, forced recompute) of one long conversation."""

    def run(conversation, **more):
        chat = {"conversation": conversation, "prompt_tokens": 1500, **more}
        answer, control = play.chat(**chat), play.chat(**chat, cache_salt=secrets.token_hex(8))
        assert control["cached_tokens"] == 0
        return answer, control

    return run


pytest_runtest_makereport = journal_of_what_failed
