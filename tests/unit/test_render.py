"""What the services read: env files, the adapter's JSON, the connector's JSON."""

import json
import subprocess

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import render

HARD_VALUES = [
    "plain",
    "",
    "two words",
    '{"a":"b","c":[1,2]}',
    "it's",
    "both \" and '",
    "$HOME `id` \\ %n %%",
    "# not a comment",
    "'\"'$(touch /tmp/never)'\"'",
    "модель 模型",
    "a\\",
    "=",
]


@pytest.mark.parametrize("value", HARD_VALUES)
def test_a_shell_reads_back_what_was_written(value, tmp_path):
    path = tmp_path / "x.env"
    path.write_text(render.env_file({"VALUE": value}))
    script = '. "$0"; printf %s "$VALUE"'
    read = subprocess.run(["sh", "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert read.stdout == value


def test_native_types():
    written = render.env_file({"A": True, "B": 4, "C": None, "D": 0.9, "E": [{"x": 1}]})
    assert written == "A=true\nB=4\nC=\nD=0.9\nE='[{\"x\":1}]'\n"


@pytest.mark.parametrize("value", ["a\nExecStartPre=/bin/false", "a\rb", "\x00", "\u2028", "\x1b[31m"])
def test_what_no_line_can_carry_is_refused(value):
    with pytest.raises(ValueError, match="^NAME is"):
        render.env_file({"NAME": value})


@pytest.mark.parametrize("name", ["", "1A", "A B", "A=B", "A-B", "A\n"])
def test_bad_names_are_refused(name):
    with pytest.raises(ValueError, match="environment variable"):
        render.env_file({name: "x"})


STOCK = "nixl_store_dynamic"


def test_l2_adapter_is_the_plugin():
    adapter = json.loads(render.l2_adapter("/kv", "4", reserve_gb=0.5, quotas_gb={"a-kvp-1": "1.5"}, fsync="none"))
    assert adapter["type"] == "plugin"
    assert "eviction" not in adapter
    assert adapter["adapter_params"] == {
        "root": "/kv",
        "budget_bytes": 4 * render.GB,
        "reserve_bytes": render.GB // 2,
        "quotas": {"a-kvp-1": 1500000000},
        "trigger_watermark": 0.9,
        "eviction_ratio": 0.1,
        "fsync": "none",
        "gate_file": "/run/kvpersist/gate.json",
    }


def test_l2_adapter_has_the_types_that_lmcache_reads():
    adapter = json.loads(render.l2_adapter("/kv", 1500, adapter=STOCK))
    assert adapter["backend_params"] == {"file_path": "/kv", "use_direct_io": "false", "max_capacity_gb": "1396.983"}
    assert adapter["eviction"] == {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.1}
    assert adapter["persist_enabled"] is True
    direct = json.loads(render.l2_adapter("/kv", "4", adapter=STOCK, direct_io=True))
    assert direct["backend_params"]["use_direct_io"] == "true"


def test_l2_budget_is_never_rounded_up():
    for size in (0.01, 1, 4, 999.99, 1500):
        capacity = float(json.loads(render.l2_adapter("/kv", size, adapter=STOCK))["backend_params"]["max_capacity_gb"])
        assert capacity * render.GIB <= size * render.GB


def test_the_stock_adapter_takes_no_codec_and_no_quotas():
    with pytest.raises(ValueError, match="^serde is 'zstd'; allowed with nixl_store_dynamic: none"):
        render.l2_adapter("/kv", 4, adapter=STOCK, serde="zstd")
    with pytest.raises(ValueError, match="^quotas_gb is .* knows no quotas"):
        render.l2_adapter("/kv", 4, adapter=STOCK, quotas_gb={"a": 1})


@pytest.mark.parametrize(
    "bad",
    [
        {"l2_size_gb": 0},
        {"l2_size_gb": -1},
        {"l2_size_gb": "64G"},
        {"l2_size_gb": True},
        {"l2_size_gb": float("inf")},
        {"trigger_watermark": 0},
        {"trigger_watermark": 1.5},
        {"eviction_ratio": 2},
        {"adapter": "fs"},
        {"serde": "fp8"},
        {"serde": "turboquant"},
        {"fsync": "always"},
        {"reserve_gb": -1},
        {"cache_root": "kv"},
    ],
)
def test_l2_refusals_name_the_parameter(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} is"):
        render.l2_adapter(**{"cache_root": "/kv", "l2_size_gb": 1500, **bad})


@pytest.mark.parametrize(
    ("spelling", "rendered"),
    [
        ("127.0.0.1", "tcp://127.0.0.1"),
        ("127.0.0.1:5555", "tcp://127.0.0.1"),
        ("tcp://127.0.0.1", "tcp://127.0.0.1"),
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1"),
        ("localhost", "tcp://127.0.0.1"),
        ("LOCALHOST:5555", "tcp://127.0.0.1"),
        ("::1", "tcp://[::1]"),
        ("[::1]:5555", "tcp://[::1]"),
        ("tcp://[::1]", "tcp://[::1]"),
    ],
)
def test_one_form_for_every_spelling_of_a_host(spelling, rendered):
    assert render.server_host(spelling) == rendered


@pytest.mark.parametrize("bad", ["", "tcp://", "http://x", "a b", "x/y", "$(id)", "[::1"])
def test_bad_hosts_are_refused(bad):
    with pytest.raises(ValueError, match="^host is"):
        render.server_host(bad)


def test_kv_transfer():
    config = json.loads(render.kv_transfer("localhost", "5555"))
    assert config["kv_connector"] == "LMCacheMPConnector"
    assert config["kv_connector_module_path"] == "lmcache.integration.vllm.lmcache_mp_connector"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"]["lmcache.mp.host"] == "tcp://127.0.0.1"
    assert config["kv_connector_extra_config"]["lmcache.mp.port"] == 5555
    with pytest.raises(ValueError, match="^port is"):
        render.kv_transfer(port=70000)
