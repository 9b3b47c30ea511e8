"""Fixtures of the scenario; the journal is shown when a test fails."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests/hosts"))

from play import Play  # noqa: E402  (the path above comes first)


@pytest.fixture
def play(host):
    return Play(host)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" and report.failed and "host" in item.funcargs:
        journal = item.funcargs["host"].run("journalctl -b --no-pager -n 80 -u 'kvpersist-*'")
        report.sections.append(("journal of the services", journal.stdout))
