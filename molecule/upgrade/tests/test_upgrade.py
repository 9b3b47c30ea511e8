"""A VM of an earlier version is taken to this one and back; the cache files of both are kept.

An earlier version is the last commit that had its number. Its own playbook, roles and demo settings are used.
"""

import json
import os
import re
import shutil
import subprocess

import pytest
from play import REPO, Play, told

GALAXY = "collections/ansible_collections/sikkatu/kvpersist/galaxy.yml"
#: Versions whose namespace and format are those of this one: their chats are served after the upgrade.
SAME = {"0.3.0"}
QUESTION = "Tell me about the sea and the ships on it. " * 90  # some 1,000 tokens


def git(*words):
    return subprocess.run(["git", "-C", REPO, *words], capture_output=True, text=True, check=True).stdout


def earlier():
    """Commits of the earlier versions, oldest first, by version."""
    found = {}
    for commit in reversed(git("log", "--format=%H", "HEAD", "--", GALAXY).split()[:-1]):
        before = git("rev-parse", f"{commit}^").strip()
        version = re.search(r"^version: (.*)$", git("show", f"{before}:{GALAXY}"), re.M)[1]
        if version not in git("show", f"{commit}:{GALAXY}"):
            found[version] = before
    return found


class Release:
    """One version of the product, as it was checked out then."""

    def __init__(self, host, play, tree):
        self.host, self.play = host, play
        if tree != REPO:
            inventory = tree / "molecule/upgrade-inventory"
            shutil.copytree(tree / "inventories/demo/group_vars", inventory / "group_vars")
            shutil.copy(REPO / "molecule/upgrade/inventory/hosts.yml", inventory)
            self.play = Play(host, play.name, str(inventory), tree)

    def deploy(self):
        code, output = self.play.site()
        assert code == 0, told(output)

    def uninstall(self):
        code, output = self.play.book("uninstall.yml")
        assert code == 0, told(output)

    def ask(self):
        """(cached tokens, tokens) of the one chat, and the tokens of its recompute."""
        answers = []
        for salt in ({}, {"cache_salt": os.urandom(8).hex()}):
            body = {
                "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
                "messages": [{"role": "user", "content": QUESTION}],
                **{"max_tokens": 8, "temperature": 0, "return_token_ids": True},
                **salt,
            }
            url = "http://127.0.0.1:8000/v1/chat/completions"
            sent = f"curl -sf -H 'Content-Type: application/json' -d '{json.dumps(body)}' {url}"
            answer = json.loads(self.host.check_output(sent))
            cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            answers.append((cached, answer["choices"][0]["token_ids"]))
        assert answers[1][0] == 0
        return answers[0], answers[1][1]

    def files(self):
        return set(self.host.check_output("find /var/lib/kvpersist -name '*.bin' -printf '%f\\n'").split())


@pytest.fixture
def release(host, play, tmp_path):
    trees = []

    def of(commit=None):
        tree = REPO
        if commit:
            tree = tmp_path / commit
            git("worktree", "add", "--detach", str(tree), commit)
            trees.append(tree)
        return Release(host, play, tree)

    yield of
    for tree in trees:
        git("worktree", "remove", "--force", str(tree))


def test_the_history_is_there():
    assert set(earlier()) > SAME


@pytest.mark.parametrize("version", earlier())
def test_there_and_back(release, version):
    before, now = release(earlier()[version]), release()
    before.deploy()
    (_, first), control = before.ask()
    assert first == control
    (cached, tokens), _ = before.ask()
    assert cached > 500
    assert tokens == control
    old = before.files()

    now.deploy()  # over what runs
    assert now.files() >= old
    (cached, tokens), control = now.ask()
    assert tokens == control
    assert (cached > 500) == (version in SAME)
    (cached, _), _ = now.ask()
    assert cached > 500
    both = now.files()
    assert both >= old

    now.uninstall()  # an earlier version would not know the units of this one
    before.deploy()
    assert before.files() >= both
    (cached, tokens), control = before.ask()
    assert cached > 500
    assert tokens == control
    now.uninstall()
