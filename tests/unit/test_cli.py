"""kvp-admin on files of its own: exit codes and messages."""

import http.server
import json
import os
import stat
import subprocess
import sys
import threading
import types

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import cli, state
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.identity import CacheIdentity, env_names
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.objects import ChunkKey, file_name
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist.render import env_file
from conftest import COLLECTION
from test_identity import PINS
from test_retention import crc, edited, framed

IDENTITY = CacheIdentity.from_fields(PINS)


@pytest.fixture
def admin(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_unit_states", lambda: dict.fromkeys(cli.UNITS, "active"))
    pins = {env_names()[name]: value for name, value in IDENTITY.items}
    named = {**pins, "KVP_NAMESPACE": IDENTITY.namespace(), "KVP_MODEL": IDENTITY.lmcache_model_name()}
    (tmp_path / "identity.env").write_text(env_file(named))
    (tmp_path / "run").mkdir()
    (tmp_path / "cache.env").write_text("KVP_CACHE_ROOT=/nowhere\nKVP_L1_SIZE_GB=0.5\nKVP_L2_SIZE_GB=30\n")

    def run(*words):
        code = cli.main(["--config-dir", str(tmp_path), "--run-dir", str(tmp_path / "run"), *words])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    run.path = tmp_path
    return run


def test_status_says_each_reason(admin):
    code, out, _ = admin("status")
    assert code == 1
    assert "vLLM was never started" in out
    assert "the gate never ran" in out
    state.write("vllm", {"caching": False, "reason": "lmcache did not answer"}, str(admin.path / "run"))
    state.write(
        "gate",
        {"gate": "refused", "reason": "no", "differences": ["block_size: 1, 2"], "model": ""},
        str(admin.path / "run"),
    )
    code, out, _ = admin("status")
    assert (code, out.splitlines()[0]) == (1, "UNCACHED")
    assert "vLLM serves uncached: lmcache did not answer" in out
    assert "problem    block_size: 1, 2" in out
    (admin.path / "identity.env").write_text("KVP_NAMESPACE=\nKVP_UNCACHED_REASON='dtype is auto'\n")
    assert "serving uncached on purpose: dtype is auto" in admin("status")[1]


def test_status_of_a_host_that_was_never_provisioned(admin):
    (admin.path / "identity.env").unlink()
    code, _, err = admin("status")
    assert (code, "provision this host" in err) == (2, True)


def test_odd_files_are_no_traceback(admin):
    for name in ("gate.json", "vllm.json"):
        for text in ("{}", '{"gate": "refused"}', '{"caching": true}', "[", "[" * 100000):
            for folder in ("", "run"):
                (admin.path / folder / name).write_text(text)
            assert admin("status")[0] == 1
    (admin.path / "deep.json").write_text("[" * 100000)
    assert admin("identity", "--fields", str(admin.path / "deep.json"))[0] == 2


def test_identity(admin):
    code, out, _ = admin("identity", "--json")
    assert (code, json.loads(out)["namespace"]) == (0, IDENTITY.namespace())
    path = admin.path / "identity.env"
    path.write_text(path.read_text().replace("KVP_BLOCK_SIZE=16", "KVP_BLOCK_SIZE=32"))
    code, _, err = admin("identity")
    assert (code, "identity.env was edited" in err) == (1, True)
    path.write_text(path.read_text().replace("KVP_DTYPE=bfloat16", "KVP_DTYPE=auto"))
    code, _, err = admin("identity")
    assert (code, err) == (2, 'kvp-admin: dtype is "auto"; allowed: one of bfloat16, float16, float32\n')


def test_published_vectors(admin):
    for vector in json.loads((COLLECTION / "docs/identity-vectors.json").read_text()):
        (admin.path / "fields.json").write_text(json.dumps(vector["fields"]))
        code, out, _ = admin("identity", "--json", "--fields", str(admin.path / "fields.json"))
        assert code == 0
        assert json.loads(out) == {key: vector[key] for key in ("namespace", "model", "canonical")}


def test_plan(admin):
    code, out, _ = admin("plan", "--tokens", "1000000")
    assert code == 0
    assert "64 layers, 8 KV heads, K 128 V 128: 65536 bytes per token and rank" in out
    assert "one chunk  256 tokens, 4 file(s) of 16777216 bytes" in out
    assert "1000000 tokens take 262.194 GB in 15628 files" in out
    assert "warning    the disk budget holds 114432 tokens" in out
    code, out, _ = admin("plan", "--budget", "1500", "--l1", "1000000", "--json")
    planned = json.loads(out)
    assert planned["l2_tokens"] == 5721856
    assert planned["warnings"][0].startswith("kvp_l1_size_gb is 1e+06 GiB, but the host has")


def chunk(model, number=1):
    return ChunkKey(model, number.to_bytes(32, "big"), 0x01000100)


@pytest.fixture
def cache(admin):
    """A cache root with one live and one dead chunk, and something that is neither."""
    root = admin.path / "root"
    root.mkdir()
    (admin.path / "cache.env").write_text(f"KVP_CACHE_ROOT={root}\nKVP_L2_SIZE_GB=0.00001\n")
    for model in (IDENTITY.lmcache_model_name(), "old-kvp-1"):
        (root / file_name(chunk(model))).write_bytes(b"x" * 8192)
    (root / "notes.txt").write_text("mine")
    return root


def test_report(admin, cache):
    code, out, _ = admin("report")
    assert code == 0
    assert "shared prefixes: unknown, the server does not tell what it served" in out
    assert f"live  {IDENTITY.lmcache_model_name()}" in out
    assert "DEAD  old-kvp-1" in out
    assert json.loads(admin("report", "--json")[1])["namespaces"]["old-kvp-1"]["objects"] == 1


def test_report_warns(admin, cache):
    (admin.path / "lmcache-server.env").write_text(
        env_file({"KVP_L2_ADAPTER": {"adapter_params": {"reserve_bytes": 10**18}}})
    )
    code, out, _ = admin("report")
    assert code == 0
    warnings = [line for line in out.splitlines() if line.startswith("warning  ")]
    assert [line.split()[1:3] for line in warnings] == [["dead", "namespaces"], ["the", "root"], ["the", "disk"]]
    assert all("kvp-admin cleanup --dead" in line for line in warnings)
    assert json.loads(admin("report", "--json")[1])["warnings"] == [line[9:] for line in warnings]
    # Another host's root has another budget.
    assert "warning" not in admin("report", "--root", str(cache))[1]
    (admin.path / "cache.env").write_text(f"KVP_CACHE_ROOT={cache}\n")
    assert json.loads(admin("report", "--json")[1])["budget_bytes"] is None


METRICS = """# TYPE lmcache_mp_lookup_hit_tokens_total counter
lmcache_mp_lookup_hit_tokens_total{{cache_salt="",model_name="{model}",otel_scope_name="lmcache"}} 512.0
lmcache_mp_lookup_hit_tokens_total{{cache_salt="a\\"}},b",model_name="{model}",otel_scope_name="lmcache"}} 1.2e+03
lmcache_mp_lookup_hit_tokens_total{{cache_salt="",model_name="other",otel_scope_name="lmcache"}} 7.0
lmcache_mp_lookup_requested_tokens_total{{cache_salt="",model_name="{model}"}} 99999.0
"""


@pytest.fixture
def server(admin):
    """What the lmcache server shows at /metrics."""

    class Handler(http.server.BaseHTTPRequestHandler):
        text = ""

        def do_GET(self):
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(self.text.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_port}"
        (admin.path / "gate.json").write_text(json.dumps({"lmcache_url": url}))
        yield Handler
        listening.shutdown()


def test_status_of_a_host_that_caches(admin, cache, server):
    (admin.path / "cache.env").write_text(f"KVP_CACHE_ROOT={cache}\nKVP_L2_SIZE_GB=1\n")
    state.write("vllm", {"caching": True, "reason": ""}, str(admin.path / "run"))
    state.write("gate", {"gate": "open", "reason": "", "differences": [], "model": "m"}, str(admin.path / "run"))
    code, out, _ = admin("status")
    assert (code, out.splitlines()[0]) == (0, "cached")
    code, out, _ = admin("status", "--json")
    assert json.loads(out)["caching"] is True


def test_status_says_what_is_wrong_with_the_store(admin, cache, server, monkeypatch):
    """The services run, and yet nothing can be stored or read."""

    def said(**disk):
        real = os.statvfs(cache)
        seen = {"f_bavail": real.f_bavail, "f_frsize": real.f_frsize, "f_flag": 0, **disk}
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(**seen))
            code, out, _ = admin("status", "--json")
        return code, " ".join(json.loads(out)["problems"])

    state.write("vllm", {"caching": True, "reason": ""}, str(admin.path / "run"))
    state.write("gate", {"gate": "open", "reason": "", "differences": [], "model": "m"}, str(admin.path / "run"))
    (admin.path / "cache.env").write_text(f"KVP_CACHE_ROOT={cache}\nKVP_L2_SIZE_GB=1\n")
    assert said() == (0, "")
    assert said(f_flag=os.ST_RDONLY) == (
        1,
        f"{cache} is mounted read-only, so nothing is stored: mount -o remount,rw its mount point (findmnt -T {cache})",
    )
    code, text = said(f_bavail=0)
    assert (code, f"the disk of {cache} is full" in text) == (1, True)
    server.text = (
        'kvp_disk_bytes{class="live",otel_scope_name="kvpersist"} 4e+08\nkvp_disk_bytes{class="dead"} 9.4e+08\n'
    )
    assert said() == (0, "")
    server.text += 'kvp_disk_bytes{class="foreign"} 2e+07\n'
    code, text = said()
    assert (code, "0.960 GB of the budget of 1.000 GB, so nothing is stored" in text) == (1, True)
    (admin.path / "cache.env").write_text("KVP_CACHE_ROOT=/nowhere\n")
    code, text = said()
    assert (code, "/nowhere cannot be read: No such file or directory. Is its disk there" in text) == (1, True)
    (admin.path / "gate.json").write_text('{"lmcache_url": "http://127.0.0.1:9"}')
    assert "kvpersist-lmcache is active, but does not answer" in said()[1]
    monkeypatch.setattr(cli, "_unit_states", lambda: dict.fromkeys(cli.UNITS, "inactive"))
    assert "does not answer" not in said()[1]


def test_report_asks_the_running_server_what_it_served(admin, cache, server):
    model = IDENTITY.lmcache_model_name()
    (cache / f"{IDENTITY.namespace()}.json").write_text(json.dumps({"model": model, "identity": {"chunk_size": 256}}))

    def served():
        shown = json.loads(admin("report", "--json")[1])["namespaces"][model]
        return shown["served_tokens"], shown["saved_bytes"]

    server.text = METRICS.format(model=model)
    assert served() == (1712, 1712 * 8192 // 256)
    out = admin("report")[1]
    assert "1712 tokens served from the cache since the server started" in out
    assert (
        f'kvp_report_namespace_served_tokens{{namespace="{IDENTITY.namespace()}",' in admin("report", "--prometheus")[1]
    )
    assert json.loads(admin("report", "--json", "--root", str(cache))[1])["namespaces"][model]["served_tokens"] is None
    server.text = "lmcache_mp_l1_memory_usage_bytes 1.0\n"
    assert served() == (0, 0)
    server.text = "something_else 1\n"
    assert served() == (None, None)
    (admin.path / "gate.json").write_text("{}")
    assert served() == (None, None)


def test_report_for_prometheus(admin, cache):
    code, out, _ = admin("report", "--prometheus")
    assert code == 0
    assert f'kvp_report_namespace_bytes{{namespace="{IDENTITY.namespace()}",' in out
    assert 'model="old-kvp-1",class="dead"} 8192' in out
    with pytest.raises(SystemExit):
        admin("report", "--prometheus", "--json")


def test_a_name_takes_one_line(admin, cache):
    (cache / file_name(chunk("new\nline\udcff-kvp-3"))).write_bytes(b"x")
    out = admin("report")[1]
    assert r"DEAD  'new\nline" in out
    out = admin("cleanup", "--dead")[1]
    assert len(out.splitlines()) == 3
    assert r"'new\nline\udcff-kvp-3_" in out
    assert admin("cleanup", "--dead", "--apply")[0] == 0
    assert len(list(cache.glob("*.bin"))) == 1


def test_cleanup_lists_and_then_removes(admin, cache):
    before = set(cache.iterdir())
    code, out, _ = admin("cleanup", "--dead")
    assert (code, "would be removed (nothing was; add --apply)" in out) == (0, True)
    assert set(cache.iterdir()) == before
    code, out, _ = admin("cleanup", "--dead", "--apply", "--json")
    assert json.loads(out)["files"] == [{"name": file_name(chunk("old-kvp-1")), "bytes": 8192}]
    assert len(set(cache.iterdir())) == 2
    assert admin("cleanup", "--dead", "--apply")[1].startswith("0 files")


def test_cleanup_of_one_namespace_by_its_short_name(admin, cache):
    code, out, _ = admin("cleanup", "--namespace", IDENTITY.namespace(), "--apply")
    assert code == 0
    assert sorted(path.name for path in cache.iterdir()) == ["notes.txt", file_name(chunk("old-kvp-1"))]
    code, _, err = admin("cleanup", "--namespace", "nobody")
    assert (code, "--namespace is nobody; allowed: old-kvp-1" in err) == (2, True)
    # What is gone already is no mistake: the second run of a play says the same as the first.
    code, out, _ = admin("cleanup", "--namespace", IDENTITY.namespace(), "--apply")
    assert (code, out.startswith("0 files")) == (0, True)


def test_cleanup_of_one_namespace_takes_its_decorated_name_along(admin, cache):
    decorated = cache / file_name(chunk(f"{IDENTITY.lmcache_model_name()}##dcp"))
    decorated.write_bytes(b"x" * 8192)
    assert admin("cleanup", "--dead")[1].count(".bin") == 1
    code, out, _ = admin("cleanup", "--namespace", IDENTITY.namespace(), "--apply")
    assert (code, "2 files" in out, decorated.exists()) == (0, True, False)


def test_cleanup_says_what_it_had_to_keep(admin, cache, monkeypatch):
    really = cli.retention.removable

    def swapped(*words, **more):
        chosen = really(*words, **more)
        (cache / chosen[0].name).unlink()
        (cache / chosen[0].name).symlink_to(cache / "notes.txt")
        return chosen

    monkeypatch.setattr(cli.retention, "removable", swapped)
    code, out, err = admin("cleanup", "--dead", "--apply")
    assert (code, out.startswith("0 files")) == (1, True)
    assert "it is no regular file of this file system any more" in err
    assert (cache / "notes.txt").exists()


def test_cleanup_to_the_budget(admin, cache):
    code, out, _ = admin("cleanup", "--to-budget", "0.000013", "--apply")
    assert (code, "1 files" in out) == (0, True)
    assert not (cache / file_name(chunk("old-kvp-1"))).exists()


def test_cleanup_tells_a_running_server(admin, cache):
    (cache / ".kvpersist").mkdir()
    admin("cleanup", "--dead")
    assert not (cache / ".kvpersist/changed").exists()
    admin("cleanup", "--dead", "--apply")
    assert stat.S_IMODE((cache / ".kvpersist/changed").stat().st_mode) == 0o600


@pytest.fixture
def checksums(monkeypatch):
    monkeypatch.setitem(sys.modules, "crc32c", types.SimpleNamespace(crc32c=crc))


@pytest.fixture
def frames(admin, checksums):
    root = admin.path / "root"
    root.mkdir()
    (admin.path / "cache.env").write_text(f"KVP_CACHE_ROOT={root}\nKVP_L2_SIZE_GB=1\n")
    for number in range(3):
        framed(root, number, model=IDENTITY.lmcache_model_name())
    framed(root, 1, model="old-kvp-1")
    return root


def test_verify_of_an_intact_cache(admin, frames):
    code, out, err = admin("verify")
    assert (code, out, err) == (0, "4 files are intact, 0 damaged, 0 unreadable; 0.000 GB read\n", "")
    shown = json.loads(admin("verify", "--json", "--rate", "1000")[1])
    assert (shown["files"]["ok"], shown["bytes"], shown["damaged"], shown["unreadable"]) == (4, 4 * 12288, [], [])


def test_verify_lists_what_is_damaged_and_changes_nothing(admin, frames):
    path = frames / file_name(ChunkKey("old-kvp-1", (1).to_bytes(32, "big"), 0x04000400))
    edited(path, 5000, b"!")
    before = {each.name: each.read_bytes() for each in frames.iterdir()}
    code, out, _ = admin("verify")
    assert code == 1
    assert out.splitlines()[0] == f"damaged    {path.name}: the checksum does not match"
    assert out.splitlines()[1].startswith("3 files are intact, 1 damaged")
    code, out, _ = admin("verify", "--json")
    assert (code, json.loads(out)["damaged"]) == (1, [{"name": path.name, "why": "the checksum does not match"}])
    assert {each.name: each.read_bytes() for each in frames.iterdir()} == before
    assert admin("verify", "--namespace", IDENTITY.namespace())[0] == 0
    assert admin("verify", "--namespace", "old-kvp-1", "--namespace", IDENTITY.namespace())[0] == 1
    code, _, err = admin("verify", "--namespace", "nobody")
    assert (code, "--namespace is nobody; allowed: old-kvp-1" in err) == (2, True)


def test_verify_counts_what_is_no_damage(admin, frames):
    manifest = {"model": IDENTITY.lmcache_model_name(), "identity": {"store_format": "raw"}}
    (frames / f"{IDENTITY.namespace()}.json").write_text(json.dumps(manifest))
    edited(frames / file_name(ChunkKey("old-kvp-1", (1).to_bytes(32, "big"), 0x04000400)), 8, b"\x63")
    code, out, _ = admin("verify")
    assert code == 0
    assert "0 files are intact, 0 damaged, 0 unreadable, 1 of another release (kept), 3 cannot be checked" in out


def test_verify_says_what_it_cannot_read(admin, frames, monkeypatch):
    really = os.open

    def refused(path, *rest, **more):
        if str(path).startswith("old"):
            raise PermissionError(13, "Permission denied")
        return really(path, *rest, **more)

    monkeypatch.setattr(os, "open", refused)
    code, out, _ = admin("verify")
    assert (code, out.startswith("unreadable old-kvp-1"), "Permission denied" in out) == (1, True, True)


def test_verify_without_crc32c_names_the_python_that_has_it(admin, cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "crc32c", None)
    code, _, err = admin("verify")
    assert code == 2
    assert f"which {sys.executable} lacks: {cli.PYTHON} has it" in err
    # Nothing else needs it.
    assert (admin("report")[0], admin("cleanup")[0]) == (0, 0)


@pytest.mark.parametrize("rate", ["0", "-1", "x", "nan", "inf"])
def test_wrong_rates(admin, rate):
    with pytest.raises(SystemExit) as end:
        admin("verify", "--rate", rate)
    assert end.value.code == 2


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_shows_the_exit_codes(admin, capsys, command):
    with pytest.raises(SystemExit) as end:
        admin(*command.split(), "--help")
    assert end.value.code == 0
    assert "Exit codes: 0 as asked; 1 something is not as it should be" in " ".join(capsys.readouterr().out.split())


def test_the_launcher_runs_from_lmcaches_environment(tmp_path):
    """Where it is installed; and before that from the host's Python."""
    text = (COLLECTION / "roles/kvp/files/kvp-admin").read_text()
    assert f'"{cli.PYTHON}"' in text
    place = cli.PYTHON.partition("/lmcache-venv/")[0]
    assert '{{ __kvp_lib_dir }}/lmcache-venv"' in (COLLECTION / "roles/kvp_lmcache/tasks/install.yml").read_text()
    launcher, lib = tmp_path / "kvp-admin", tmp_path / "lib"
    launcher.write_text(text.replace(place, str(lib)).replace("#!/usr/bin/env python3", f"#!{sys.executable}"))
    launcher.chmod(0o755)
    lib.mkdir()
    (lib / "kvpersist").symlink_to(COLLECTION / "plugins/module_utils/kvpersist")
    (tmp_path / "root").mkdir()
    (tmp_path / "identity.env").write_text("KVP_NAMESPACE=\n")
    (tmp_path / "cache.env").write_text(f"KVP_CACHE_ROOT={tmp_path / 'root'}\n")

    def run(*words):
        command = [str(launcher), "--config-dir", str(tmp_path), *words]
        env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=False)
        return done.returncode, done.stdout, done.stderr

    assert run("report", "--json")[0] == 0
    assert run("verify")[0] == 2
    (lib / "lmcache-venv").symlink_to(tmp_path / "env")  # as after a removed environment
    assert run("report", "--json")[0] == 0
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "crc32c.py").write_text("def crc32c(data, start=0):\n    return 0\n")
    assert run("verify") == (0, "0 files are intact, 0 damaged, 0 unreadable; 0.000 GB read\n", "")


def test_a_root_that_is_not_there(admin, checksums):
    for command in ("report", "verify", "cleanup"):
        code, _, err = admin(command)
        assert (code, "/nowhere is no directory" in err) == (2, True)


@pytest.mark.parametrize("words", [["cleanup", "--older-than", "5"], ["cleanup", "--to-budget", "0"]])
def test_wrong_use_of_cleanup(admin, words):
    with pytest.raises(SystemExit) as end:
        admin(*words)
    assert end.value.code == 2


@pytest.mark.parametrize("words", [["plan", "--budget", "-1"], ["plan", "--tokens", "x"], ["nothing"], []])
def test_wrong_use(admin, words):
    with pytest.raises(SystemExit) as end:
        admin(*words)
    assert end.value.code == 2


def test_nothing_is_dead_on_a_host_that_serves_uncached(admin, tmp_path):
    """It may serve those namespaces again tomorrow."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / file_name(chunk("old-kvp-1"))).write_bytes(b"x")
    (admin.path / "identity.env").write_text("KVP_NAMESPACE=\nKVP_MODEL=uncached-x\n")
    (admin.path / "cache.env").write_text(f"KVP_CACHE_ROOT={tmp_path}/root\n")
    code, _, err = admin("cleanup", "--dead", "--apply")
    assert (code, len(list((tmp_path / "root").iterdir()))) == (2, 1)
    assert "--dead is given, but this host serves uncached" in err


def test_what_is_dead_in_another_hosts_cache_is_not_known(admin, cache, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / file_name(chunk("old-kvp-1"))).write_bytes(b"x")
    code, _, err = admin("cleanup", "--root", str(elsewhere), "--dead", "--apply")
    assert code == 2
    assert f"--dead is given with --root {elsewhere}, which is not this host's cache" in err
    assert len(list(elsewhere.iterdir())) == 1
    assert admin("cleanup", "--root", f"{cache}/", "--dead", "--apply")[0] == 0
    assert not (cache / file_name(chunk("old-kvp-1"))).exists()
