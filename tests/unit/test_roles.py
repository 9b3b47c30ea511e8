"""Defaults and argument_specs say the same; pins that stand in two places are equal."""

import re
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import COLLECTION, REPO

ROLES = sorted(path.name for path in (COLLECTION / "roles").iterdir())


def load(role, path):
    file = COLLECTION / "roles" / role / path
    return (yaml.safe_load(file.read_text()) or {}) if file.exists() else {}


@pytest.mark.parametrize("role", ROLES)
def test_defaults_equal_argument_specs(role):
    defaults = load(role, "defaults/main.yml")
    specs = load(role, "meta/argument_specs.yml")["argument_specs"]
    for entry in specs.values():
        options = entry["options"]
        assert {name: option["default"] for name, option in options.items() if "default" in option} == defaults
        for name, option in options.items():
            assert option.get("description"), name
            assert option.get("type"), name
            assert option.get("required", False) != ("default" in option), f"{name}: required or a default"


@pytest.mark.parametrize("role", ROLES)
def test_variables_carry_the_name_of_the_role(role):
    for name in load(role, "defaults/main.yml"):
        assert name.startswith(f"{role}_")
    for name in load(role, "vars/main.yml"):
        assert name.startswith(f"__{role}_")


def test_defaults_that_are_commented_out_are_the_required_ones():
    for role in ROLES:
        path = COLLECTION / "roles" / role / "defaults/main.yml"
        shown = set(re.findall(r"^# (kvp_\w+):", path.read_text(), re.M)) if path.exists() else set()
        options = load(role, "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
        assert shown == {name for name, option in options.items() if option.get("required")}


def pins(path):
    lines = (line.split("#")[0].strip() for line in path.read_text().splitlines())
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in (x.split("==") for x in lines if x)}


def test_server_and_serving_image_have_the_same_versions():
    image = pins(REPO / "requirements/serving-cpu.txt")
    server = pins(COLLECTION / "roles/kvp_lmcache/files/requirements-cpu.txt")
    assert server.items() <= image.items()


def test_one_version_of_the_installer():
    installer = load("kvp_lmcache", "vars/main.yml")["__kvp_lmcache_uv"]
    assert installer.split("==")[1] == pins(REPO / "requirements/bootstrap.txt")["uv"]


@pytest.mark.parametrize("name", ["LICENSE", "NOTICE"])
def test_licence_stands_in_the_collection_too(name):
    assert (REPO / name).read_bytes() == (COLLECTION / name).read_bytes()


def test_the_core_on_the_host_is_complete(tmp_path):
    """The listed files run by themselves: kvp-admin, the gate and what the launcher imports."""
    (tmp_path / "kvpersist").mkdir()
    for name in load("kvp", "vars/main.yml")["__kvp_core"]:
        shutil.copy(COLLECTION / f"plugins/module_utils/kvpersist/{name}.py", tmp_path / "kvpersist")
    code = "from kvpersist import cli, gate, state, weights; cli.parser()"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
