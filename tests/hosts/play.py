"""Helpers of the molecule tests: run a playbook or one module as a user would."""

import json
import os
import pathlib
import re
import subprocess

import pytest

REPO = pathlib.Path(__file__).resolve().parents[2]

#: More cases of what `make test` shows with one or two.
long = pytest.mark.skipif("KVP_LONG" not in os.environ, reason="make test-all")


class Play:
    """Runs playbooks against the host of the current scenario."""

    docs = REPO / "collections/ansible_collections/sikkatu/kvpersist/docs"

    def __init__(self, host, name, inventory="", tree=REPO):
        """``tree``: another checkout, with its own playbooks, roles and settings."""
        self.host = host
        self.name = name
        self.tree = tree
        self.inventory = inventory or os.environ["MOLECULE_SCENARIO_DIRECTORY"] + "/inventory"
        self.env = {
            **os.environ,
            "ANSIBLE_CONFIG": str(tree / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": os.environ["ANSIBLE_COLLECTIONS_PATH"].replace(str(REPO), str(tree)),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
            "PY_COLORS": "0",
            "ANSIBLE_FORCE_COLOR": "0",
        }

    def _run(self, *command):
        run = subprocess.run(command, cwd=self.tree, env=self.env, capture_output=True, text=True, check=False)
        return run.returncode, run.stdout + run.stderr

    def book(self, playbook, *arguments, **variables):
        """(exit code, output) of one playbook with extra variables."""
        extra = ["--extra-vars", json.dumps(variables)] if variables else []
        return self._run("ansible-playbook", "-i", self.inventory, f"playbooks/{playbook}", *arguments, *extra)

    def site(self, *arguments, **variables):
        return self.book("site.yml", *arguments, **variables)

    def chat(self, **parameters):
        return self.module("chat_probe", **parameters)

    def module(self, name, **parameters):
        """The result of one of the collection's modules."""
        module = ["-m", f"sikkatu.kvpersist.{name}", "-a", json.dumps(parameters)]
        code, output = self._run("ansible", "-i", self.inventory, self.name, *module)
        assert code == 0, output
        return json.JSONDecoder().raw_decode(output, output.index("{"))[0]

    def units(self):
        """What would differ if a service had been restarted or systemd reloaded."""
        shown = {}
        for unit in ("kvpersist-lmcache", "kvpersist-vllm"):
            show = self.host.check_output(
                f"systemctl show -p ActiveState,ActiveEnterTimestampMonotonic,MainPID,NeedDaemonReload {unit}"
            )
            shown[unit] = dict(line.split("=", 1) for line in show.splitlines())
        shown["reloads"] = self.host.check_output("journalctl -b _PID=1 -o cat | grep -c '^Reloading' || true")
        return shown


def figure(text, name, **labels):
    """Sum of a figure in Prometheus' text format, of the samples that have these labels; 0 when there is none."""
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+)(?:\{(.*)\})? ([0-9.e+-]+)", line)
        if match and match[1] == name and all(f'{key}="{value}"' in match[2] for key, value in labels.items()):
            total += float(match[3])
    return total


@pytest.hookimpl(hookwrapper=True)
def journal_of_what_failed(item, call):
    """pytest_runtest_makereport of every scenario: a test that fails shows the journal of the services."""
    report = (yield).get_result()
    host = item.funcargs.get("host") or item.funcargs.get("on")
    if report.when == "call" and report.failed and host is not None:
        journal = host.run("journalctl -b --no-pager -n 80 -u 'kvpersist-*' -u by-hand -u chats")
        report.sections.append(("journal of the services", journal.stdout))


def changed(output):
    """Number of changed tasks that the recap of a play shows."""
    return int(re.search(r"changed=(\d+)", output).group(1))


def told(output):
    """The output as one line, without the indentation that cuts messages in two."""
    return re.sub(r"\s+", " ", output)
