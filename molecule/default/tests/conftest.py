"""Fixtures of the scenario; the journal is shown when a test fails."""

import pathlib
import subprocess
import sys

import pytest
import testinfra

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/hosts"))

from play import REPO, Play, journal_of_what_failed  # noqa: E402  (the path above comes first)


@pytest.fixture
def play(host):
    return Play(host, host.backend.host)


@pytest.fixture
def blank(tmp_path):
    """A second, blank host of the same kind: with its disk and docker, without any image."""
    name, script = "kvp-blank", str(REPO / "tests/hosts/host.sh")
    subprocess.run([script, "up", name], check=True)
    variables = (
        "ansible_connection=community.docker.docker ansible_user=root ansible_python_interpreter=/usr/bin/python3"
    )
    (tmp_path / "hosts").write_text(f"[kvpersist]\n{name} {variables}\n")
    (tmp_path / "group_vars").symlink_to(REPO / "inventories/demo/group_vars")
    yield Play(testinfra.get_host(f"docker://{name}"), name, str(tmp_path))
    subprocess.run([script, "down", name], check=True)


pytest_runtest_makereport = journal_of_what_failed
