"""cache_info and cache_cleanup through Ansible, against a cache root of their own."""

import json
import subprocess
import sys

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.objects import file_name
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.render import env_file
from conftest import COLLECTION, REPO
from test_cli import IDENTITY, chunk
from test_filters import ansible_env


@pytest.fixture
def host(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "kvpersist").symlink_to(COLLECTION / "plugins/module_utils/kvpersist")
    names = {"KVP_NAMESPACE": IDENTITY.namespace(), "KVP_MODEL": IDENTITY.lmcache_model_name()}
    (tmp_path / "identity.env").write_text(env_file(names))
    (tmp_path / "cache.env").write_text(env_file({"KVP_CACHE_ROOT": root, "KVP_L2_SIZE_GB": 1}))
    for model in (IDENTITY.lmcache_model_name(), "old-kvp-1"):
        (root / file_name(chunk(model))).write_bytes(b"x" * 8192)
    admin = tmp_path / "kvp-admin"
    arguments = ["--config-dir", str(tmp_path), "--run-dir", str(tmp_path)]
    admin.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        f"from kvpersist.cli import main\nsys.exit(main({arguments!r} + sys.argv[1:]))\n"
    )
    admin.chmod(0o755)

    def run(module, *words, **parameters):
        given = json.dumps({"executable": str(admin), **parameters})
        command = [sys.executable, "-m", "ansible", "adhoc", "localhost", "-c", "local", *words]
        command += [
            "-m",
            f"sikkatu.kvpersist.{module}",
            "-a",
            given,
            "-e",
            f"ansible_python_interpreter={sys.executable}",
        ]
        env = {**ansible_env(), "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=REPO, check=False)
        out = done.stdout + done.stderr
        return done.returncode, json.JSONDecoder().raw_decode(out, out.index("=> {") + 3)[0]

    run.root = root
    return run


def test_info(host):
    code, shown = host("cache_info")
    assert (code, shown["changed"]) == (0, False)
    assert shown["report"]["namespaces"]["old-kvp-1"]["objects"] == 1
    assert shown["status"]["caching"] is False
    assert (shown["report"]["budget_bytes"], shown["report"]["warnings"]) == (10**9, [])


@pytest.mark.parametrize("module", ["cache_info", "cache_cleanup"])
def test_a_host_without_the_command(host, module):
    code, shown = host(module, "--check", executable="/nowhere/kvp-admin")
    assert code != 0
    assert "/nowhere/kvp-admin" in shown["msg"]


def test_cleanup_in_check_mode_for_real_and_again(host):
    dead = host.root / file_name(chunk("old-kvp-1"))
    code, shown = host("cache_cleanup", "--check", dead=True)
    assert (code, shown["changed"], shown["files"][0]["name"], dead.exists()) == (0, True, dead.name, True)
    code, shown = host("cache_cleanup", dead=True)
    assert (code, shown["changed"], shown["bytes"], dead.exists()) == (0, True, 8192, False)
    code, shown = host("cache_cleanup", dead=True)
    assert (code, shown["changed"]) == (0, False)
    assert len(list(host.root.iterdir())) == 1


def test_cleanup_of_a_namespace_is_repeatable_and_tells_the_server(host):
    (host.root / ".kvpersist").mkdir()
    code, shown = host("cache_cleanup", "--diff", namespace=IDENTITY.namespace())
    assert (code, shown["changed"], shown["bytes"]) == (0, True, 8192)
    stamp = (host.root / ".kvpersist/changed").stat().st_mtime_ns
    code, shown = host("cache_cleanup", "--diff", namespace=IDENTITY.namespace())
    assert (code, shown["changed"], shown["files"]) == (0, False, [])
    assert (host.root / ".kvpersist/changed").stat().st_mtime_ns == stamp


def test_a_name_of_odd_bytes_comes_through(host):
    (host.root / file_name(chunk("\udcff\n-kvp-3"))).write_bytes(b"x" * 8192)
    code, shown = host("cache_cleanup", "--check", dead=True)
    assert (code, len(shown["files"])) == (0, 2)
    assert host("cache_cleanup", dead=True)[0] == 0
    assert len(list(host.root.iterdir())) == 1


def test_wrong_selections_are_told(host):
    code, shown = host("cache_cleanup", older_than="soon")
    assert code != 0
    assert "soon is no time such as 30d" in shown["msg"]
