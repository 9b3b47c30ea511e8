"""What site.yml promises on a host of its own: running, repeatable, refusing what is wrong."""

import base64
import json
import re
import subprocess

import pytest
import yaml
from play import REPO, changed, long, told

KEY, TOKEN = "sk-s3cret-of-the-test", "hf_s3cret-of-the-test"
VARS = yaml.safe_load((REPO / "molecule/default/inventory/hosts.yml").read_text())["kvpersist"]["hosts"]["kvp-default"]
CHAT = {
    "model": VARS["kvp_vllm_served_model_name"],
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 4,
}


def test_services_run_and_are_enabled(host):
    for name in ("kvpersist-lmcache", "kvpersist-vllm", "kvpersist-gate"):
        assert host.service(name).is_running
        assert host.service(name).is_enabled
    assert host.check_output("systemctl is-system-running") == "running"


def test_cache_directory_is_private_and_on_its_own_device(host):
    root = host.file("/var/lib/kvpersist")
    assert (root.user, root.group, root.mode) == ("kvpersist", "kvpersist", 0o700)
    assert host.mount_point("/var/lib/kvpersist").filesystem == "xfs"
    assert "UUID=" in host.check_output("grep /var/lib/kvpersist /etc/fstab")
    pid = host.check_output("systemctl show -p MainPID --value kvpersist-lmcache")
    assert host.file("/var/lib/kvpersist/lmcache-server.pid").content_string.strip() == pid


def test_files_of_the_seed(host):
    cache = host.file("/etc/kvpersist/cache.env").content_string
    for line in ("KVP_CACHE_ROOT=/var/lib/kvpersist", "KVP_L1_SIZE_GB=1", "KVP_L2_SIZE_GB=4", "LMCACHE_L2_SERDE=none"):
        assert line in cache.splitlines()
    identity = host.check_output(". /etc/kvpersist/identity.env; echo $KVP_NAMESPACE $KVP_MODEL")
    namespace, model = identity.split()
    assert model.endswith(namespace)
    assert len(namespace) == len("kvp-") + 32


def test_the_connector_json_arrives_as_it_was_written(host):
    pid = host.check_output("systemctl show -p MainPID --value kvpersist-lmcache")
    argv = host.check_output(f"tr '\\0' '\\n' < /proc/{pid}/cmdline").splitlines()
    adapter = json.loads(argv[argv.index("--l2-adapter") + 1])
    assert adapter["adapter_params"]["root"] == "/var/lib/kvpersist"
    top = host.check_output("docker top smollm2-kvp -eo pid,args")
    assert '"kv_load_failure_policy": "recompute"' in top


def test_registered_under_the_namespaced_name(host):
    status = json.loads(host.check_output("curl -s http://127.0.0.1:8080/status"))
    names = [context["model_name"] for context in status["cache_context_meta"].values()]
    # A vLLM that was replaced stays listed until the server forgets it.
    assert set(names) == {host.check_output(". /etc/kvpersist/identity.env; echo $KVP_MODEL")}


def test_kvp_admin_agrees_with_what_runs(host):
    status = json.loads(host.check_output("kvp-admin status --json"))
    assert (status["caching"], status["problems"]) == (True, [])
    identity = json.loads(host.check_output("kvp-admin identity --json"))
    assert identity["namespace"] == status["namespace"]
    manifest = json.loads(host.file(f"/var/lib/kvpersist/{status['namespace']}.json").content_string)
    assert manifest["identity"] == json.loads(identity["canonical"])
    # Its sizes are those of the real files.
    plan = json.loads(host.check_output("kvp-admin plan --json"))
    sizes = set(host.check_output("find /var/lib/kvpersist -name '*.bin' -printf '%s\\n'").split())
    assert sizes == {str(plan["chunk_file_bytes"])}


def test_report_and_cleanup_find_a_cache_of_one_live_namespace(host, play):
    code, output = play.book("report.yml")
    assert code == 0, output
    assert json.loads(host.check_output("kvp-admin status --json"))["model"] in output
    code, output = play.book("cleanup.yml", "--check", "--diff")
    assert (code, changed(output)) == (0, 0), output


def test_the_two_ports_of_lmcache_are_on_loopback(host):
    for port in (5555, 8080):
        assert host.socket(f"tcp://127.0.0.1:{port}").is_listening
        assert not host.socket(f"tcp://0.0.0.0:{port}").is_listening


def test_other_accounts_of_the_host_read_figures_and_no_more(host):
    def status(account, *words):
        ask = f"curl -s -o /dev/null -w '%{{http_code}}' {' '.join(words)}"
        return host.check_output(f"runuser -u {account} -- {ask}")

    url = "http://127.0.0.1:8080"
    for path in ("/metrics", "/status", "/healthcheck"):
        assert status("nobody", url + path) == "200"
    for words in (
        ["-X POST", "/cache/clear"],
        ["-X DELETE", "/cache/objects"],
        ["-X POST", "/run_script"],
        ["", "/config"],
    ):
        assert status("nobody", words[0], url + words[1]) == "403"
    for account in ("root", "kvpersist"):
        assert status(account, f"{url}/config") == "200"
    # Nor by the name of root's own connection, which the kernel shows to all.
    host.check_output("systemd-run --unit held bash -c 'exec 3<>/dev/tcp/127.0.0.1/8080; sleep 60'")
    root = host.check_output(
        "for n in 1 2 3 4 5; do sleep 1; ss -Htn state established dport = :8080 | head -n 1; done"
    )
    port = root.splitlines()[-1].split()[2].rpartition(":")[2]
    for header in ("X-Forwarded-For", "Forwarded"):
        assert status("nobody", "-X POST", f"-H '{header}: 127.0.0.1:{port}'", f"{url}/cache/clear") == "403"
    host.check_output("systemctl stop held")
    assert host.run("runuser -u nobody -- ls /var/lib/kvpersist").rc != 0


def test_the_firewall_rules_of_the_security_page_close_the_zmq_port_to_others(host, play):
    page = (play.docs / "en/security.md").read_text()
    rules = re.findall(r"^    (iptables -I .*)$", page, re.M)
    assert len(rules) == 3
    connect = "runuser -u {} -- bash -c '</dev/tcp/127.0.0.1/5555'"
    assert host.run(connect.format("nobody")).rc == 0
    host.check_output(" && ".join(rules))
    try:
        assert host.run(connect.format("nobody")).rc != 0
        for account in ("root", "kvpersist"):
            assert host.run(connect.format(account)).rc == 0
        assert host.run("kvp-admin status").rc == 0
    finally:
        host.check_output(" && ".join(rule.replace(" -I ", " -D ") for rule in rules))


SCAN = """
import socket, sys
for port in range(1, 65536):
    with socket.socket() as attempt:
        attempt.settimeout(2)
        if attempt.connect_ex((sys.argv[1], port)) == 0:
            print(port)
"""


def test_nothing_but_vllm_answers_to_another_host(host, play):
    shown = "{{.Config.Image}} {{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    inspect = subprocess.run(["docker", "inspect", "-f", shown, play.name], capture_output=True, text=True, check=True)
    image, address = inspect.stdout.split()
    second = ["docker", "run", "--rm", "--entrypoint", "python3", image, "-c", SCAN, address]
    assert subprocess.run(second, capture_output=True, text=True, check=True).stdout.split() == ["8000"]


def test_api_key_is_needed_and_stays_secret(host):
    url = "http://127.0.0.1:8000/v1/chat/completions"
    send = f"curl -s -o /dev/null -w '%{{http_code}}' -H 'Content-Type: application/json' -d '{json.dumps(CHAT)}' {url}"
    assert host.check_output(send) == "401"
    assert host.check_output(f"{send} -H 'Authorization: Bearer {KEY}'") == "200"
    # Also where vLLM by itself does not ask for it.
    other = send.replace("/v1/chat/completions", "/invocations")
    assert host.check_output(other) == "401"
    assert host.check_output(f"{other} -H 'Authorization: Bearer {KEY}'") == "200"
    for path, status in (("tokenize", "401"), ("v1/models", "401"), ("health", "200"), ("metrics", "200")):
        assert host.check_output(f"curl -s -o /dev/null -w '%{{http_code}}' http://127.0.0.1:8000/{path}") == status
    for where in ("docker inspect smollm2-kvp", "ps axww -o args", "journalctl -b --no-pager", "cat /etc/kvpersist/*"):
        shown = host.check_output(f"{where} | grep -v grep | grep -c -e {KEY} -e {TOKEN} || true")
        assert shown == "0", where
    assert (
        host.check_output("docker exec smollm2-kvp cat /proc/1/environ | tr '\\0' '\\n' | grep ^HF_TOKEN")
        == f"HF_TOKEN={TOKEN}"
    )


def test_text_reaches_the_process_as_it_stands(host):
    def of_vllm(file):
        text = host.check_output(f"docker exec smollm2-kvp cat /proc/1/{file} | base64 -w 0")
        return base64.b64decode(text).decode().split("\0")

    assert VARS["kvp_vllm_served_model_name"] in of_vllm("cmdline")
    assert "NOTE=" + VARS["kvp_vllm_env"]["NOTE"] in of_vllm("environ")


def test_the_server_is_sandboxed(host):
    def exposure(words):
        shown = host.check_output(f"systemd-analyze security {words} | tail -n 1 | grep -oE '[0-9]+[.][0-9]+'")
        return float(shown)

    assert exposure("kvpersist-lmcache") <= 2.0
    # With GPUs two lines are left out; judged from the file, which counts a little more than the running unit.
    unit = "/etc/systemd/system/kvpersist-lmcache.service"
    host.check_output(f"sed '/^PrivateDevices=/d; /^DevicePolicy=/d' {unit} > /run/gpu-variant.service")
    assert exposure(f"--offline=true {unit}") < exposure("--offline=true /run/gpu-variant.service") <= 2.0


def test_services_never_give_up_and_the_cache_goes_first(host):
    shown = host.check_output("systemctl show -p StartLimitIntervalUSec,OOMScoreAdjust kvpersist-lmcache").split()
    assert sorted(shown) == ["OOMScoreAdjust=500", "StartLimitIntervalUSec=0"]
    assert host.check_output("systemctl show -p StartLimitIntervalUSec --value kvpersist-vllm") == "0"


def test_second_run_changes_and_restarts_nothing(host, play):
    drop_in = "/etc/systemd/system/kvpersist-lmcache.service.d/mine.conf"  # of the operator: it is left alone
    host.check_output(f"mkdir -p $(dirname {drop_in}) && printf '[Service]\nNice=1\n' > {drop_in}")
    host.check_output("systemctl daemon-reload")
    before = play.units()
    code, output = play.site()
    assert code == 0, output
    assert changed(output) == 0, output
    assert play.units() == before
    assert host.file(drop_in).content_string == "[Service]\nNice=1\n"
    host.check_output(f"rm -r $(dirname {drop_in}) && systemctl daemon-reload")


def test_check_mode_finds_nothing_to_change(play):
    code, output = play.site("--check", "--diff")
    assert code == 0, output
    assert changed(output) == 0, output


def test_each_tag_alone_changes_nothing_on_a_deployed_host(play):
    before = play.units()
    for tag in ("storage", "identity", "lmcache", "vllm", "observability", "verify"):
        code, output = play.site("--tags", tag)
        assert code == 0, output
        assert changed(output) == 0, output
    assert play.units() == before


def touched(play):
    """All that a refused play could have changed."""
    files = "find /etc/kvpersist /etc/fstab /etc/systemd/system -type f | sort | xargs sha256sum"
    return play.units(), play.host.check_output(files)


def refused(play, *needles, **variables):
    """The play fails with a message that has the needles, and nothing was touched."""
    before = touched(play)
    code, output = play.site(**variables)
    assert code != 0, output
    for needle in needles:
        assert needle in told(output), output
    assert touched(play) == before


# A placeholder or another wrong value: what the message has to say.
WRONG = [
    (
        {
            "kvp_l2_size_gb": "inf",
            "kvp_lmcache_host": "0.0.0.0",
            "kvp_vllm_model_dir": "/srv/a:b",
            "kvp_vllm_port": "8000 ",
            "kvp_vllm_container_name": "a'; id",
            "kvp_storage_mount_options": "a\nb",
            "kvp_lmcache_extra_args": ["$(id)"],
            "kvp_vllm_memory": None,
            "kvp_user": "root",
            "kvp_vllm_env": {"HF_TOKEN": "x"},
            "kvp_lmcache_trigger_watermark": 9,
        },
        [
            'kvp_l2_size_gb is "inf"',
            "kvp_lmcache_host is",
            "loopback",
            "kvp_vllm_model_dir is",
            'kvp_vllm_port is "8000 "',
            "kvp_vllm_container_name is",
            "kvp_storage_mount_options is",
            "kvp_lmcache_extra_args is",
            "kvp_vllm_memory is null",
            'kvp_user is "root"',
            "kvp_vllm_env is not shown",
            "kvp_vllm_hf_token_file name files of root",
            "kvp_lmcache_trigger_watermark is 9",
        ],
    ),
    ({"kvp_vllm_hf_token_file": "/etc/passwd"}, ["kvp_vllm_hf_token_file names a file", "of root with mode 0644"]),
    ({"kvp_user": "backup", "kvp_group": "kvpersist"}, ["kvp_user is backup, which this host has with id 34"]),
    ({"kvp_vllm_image_unpinned": False}, ["kvp_vllm_image is kvpersist/vllm-cpu:0.32.0", "NAME@sha256:DIGEST"]),
    (
        {
            "kvp_vllm_image": "lmcache/vllm-openai@sha256:REPLACE_ME",
            "kvp_identity_kv_groups": [{"layers": 1, "window": "REPLACE_ME"}],
        },
        ["REPLACE_ME in your inventory: kvp_identity_kv_groups, kvp_vllm_image"],
    ),
    (
        {
            "kvp_identity_model_revision": "main",
            "kvp_identity_kv_cache_dtype": "auto",
            "kvp_identity_kv_groups": [{"layers": 30, "kv_heads": 3, "head_dim": 64}],
            "kvp_vllm_extra_args": ["--enable-lora"],
            "kvp_vllm_docker_args": ["--env", "VLLM_KV_CACHE_LAYOUT=NHD"],
        },
        [
            'model_revision is "main"',
            "40 hexadecimal digits",
            'kv_cache_dtype is "auto"',
            "bfloat16",
            "kv_groups[0]",
            "k_head_dim",
            "--enable-lora among the extra arguments",
            "VLLM_KV_CACHE_LAYOUT in the environment",
            "serve-uncached",
        ],
    ),
    ({"kvp_l1_size_gb": 4096}, ["kvp_l1_size_gb is 4096"]),
    ({"kvp_vllm_api_key_file": ""}, ["kvp_vllm_host is 0.0.0.0", "kvp_vllm_api_key_file is empty"]),
    ({"kvp_vllm_model_dir": "/srv/models/none"}, ["/srv/models/none/config.json"]),
    ({"kvp_vllm_extra_args": ["--dtype=half"]}, ["--dtype", "kvp_identity_"]),
    ({"kvp_lmcache_extra_args": ["--chunk-size=512"]}, ["kvp_lmcache_extra_args has --chunk-size"]),
    ({"kvp_identity_lmcache_version": "0.5.5"}, ["kvp_identity_lmcache_version is 0.5.5", "lmcache==0.5.6"]),
    ({"kvp_vllm_port": 8080}, ["kvp_vllm_port is 8080", "kvp_lmcache_http_port"]),
    ({"kvp_vllm_docker_args": ["--restart", "unless-stopped"]}, ["--restart", "the unit decides"]),
    ({"kvp_vllm_image": "nowhere/none:1"}, ["kvp_vllm_image is nowhere/none:1"]),
    ({"kvp_lmcache_variant": "gpu"}, ["kvp_lmcache_variant", "cuda, cpu"]),
    ({"kvp_storage_device": "/dev/disk/by-id/none"}, ["kvp_storage_device is /dev/disk/by-id/none"]),
]


@pytest.mark.parametrize(("variables", "needles"), WRONG, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_wrong_values_are_refused_before_anything_changes(play, variables, needles):
    refused(play, *needles, **variables)


@pytest.mark.parametrize(
    "variable", [pytest.param("kvp_lmcache_port", marks=long), "kvp_lmcache_http_port", "kvp_vllm_port"]
)
def test_a_taken_port_is_refused_and_its_owner_named(play, variable):
    play.host.check_output("systemd-run --unit squatter python3 -m http.server --bind 127.0.0.1 9999")
    try:
        refused(play, f"{variable} is 9999", "python3", **{variable: 9999})
    finally:
        play.host.check_output("systemctl stop squatter")


def test_each_tag_alone_on_a_blank_host_goes_as_far_as_it_can(blank):
    """Or it says what has to run first."""
    answers = {
        "observability": (0, "nothing was installed or changed"),
        "verify": (2, "run site.yml first"),
        "vllm": (2, "kvp_vllm_image is kvpersist/vllm-cpu:0.32.0, which this host does not have"),
        "identity": (2, "docker does not have the image kvpersist/vllm-cpu:0.32.0"),
        "lmcache": (2, "Run the kvp_storage role first"),
        "storage": (0, "mkfs.xfs"),
    }
    for tag, (wanted, text) in answers.items():
        code, output = blank.site("--diff", "--tags", tag, "-v")
        assert code == wanted, output
        assert text in told(output), output
    code, output = blank.site("--tags", "lmcache")
    assert code == 0, output
    assert blank.host.service("kvpersist-lmcache").is_running


def test_an_unmounted_cache_is_refused_while_vllm_serves_on(host):
    """Last: it takes the cache server down."""
    vllm = host.check_output("systemctl show -p InvocationID kvpersist-vllm")
    host.check_output("systemctl stop kvpersist-lmcache")
    host.check_output("cp /etc/fstab /root/fstab && sed -i /kvpersist/d /etc/fstab && systemctl daemon-reload")
    host.check_output("umount /var/lib/kvpersist")
    try:
        start = host.run("systemctl start kvpersist-lmcache")
        assert start.rc != 0
        host.check_output("systemctl stop kvpersist-lmcache")
        assert "/var/lib/kvpersist is not mounted" in host.check_output(
            "journalctl -b -o cat -u kvpersist-lmcache -n 40"
        )
        assert host.check_output("ls -A /var/lib/kvpersist") == ""
        assert host.run("runuser -u kvpersist -- touch /var/lib/kvpersist/x").rc != 0
        assert host.check_output("curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8000/health") == "200"
        assert host.check_output("systemctl show -p InvocationID kvpersist-vllm") == vllm
    finally:
        host.check_output("cp /root/fstab /etc/fstab && systemctl daemon-reload && mount /var/lib/kvpersist")
    host.check_output("systemctl start kvpersist-lmcache")


@long
def test_uninstall_refuses_what_would_end_half_done(host, play):
    host.check_output("systemctl stop kvpersist-vllm kvpersist-lmcache && umount /var/lib/kvpersist")
    before = touched(play)
    code, output = play.book("uninstall.yml", kvp_uninstall_cache_root="/var/lib/kvpersist")
    assert code != 0
    assert "/var/lib/kvpersist is not mounted, so the chunks of /var/lib/kvpersist cannot be deleted" in told(output)
    assert touched(play) == before
    # A cache among what is removed is no directory that could be kept.
    host.check_output("mount /var/lib/kvpersist && cp /etc/kvpersist/cache.env /root/cache.env")
    host.check_output("sed -i 's,^KVP_CACHE_ROOT=.*,KVP_CACHE_ROOT=/etc/kvpersist/cache,' /etc/kvpersist/cache.env")
    code, output = play.book("uninstall.yml")
    host.check_output("mv /root/cache.env /etc/kvpersist/cache.env")
    assert code != 0
    assert "The cache is /etc/kvpersist/cache, which goes with the product's own files" in told(output)
    assert touched(play) == before
    host.check_output("systemctl start kvpersist-lmcache kvpersist-vllm")


def test_uninstall_keeps_the_chunks_unless_their_directory_is_named(host, play):
    """Last of all."""
    chunks = host.check_output("ls /var/lib/kvpersist/*.bin")
    before = touched(play)
    code, output = play.book("uninstall.yml", kvp_uninstall_cache_root="/var/lib")
    assert code != 0
    assert "kvp_uninstall_cache_root is /var/lib, but this VM's cache is /var/lib/kvpersist" in told(output)
    assert touched(play) == before
    code, output = play.book("uninstall.yml", "--check", "--diff")
    assert code == 0, output
    assert touched(play) == before

    code, output = play.book("uninstall.yml")
    assert code == 0, output
    apart = " -o ".join(
        f"-path {path}" for path in ("/proc", "/sys", "/srv", "/var/lib/docker", "/var/log", "/run/systemd")
    )
    left = f"find / /run /dev/shm -xdev '(' {apart} ')' -prune"
    names = "-iname '*kvpersist*' -o -name 'kvp-*'"
    assert host.check_output(f"{left} -o '(' {names} ')' -print") == "/var/lib/kvpersist"
    assert host.run("docker inspect smollm2-kvp").rc != 0
    assert host.check_output("ls /var/lib/kvpersist/*.bin") == chunks
    assert host.mount_point("/var/lib/kvpersist").exists
    code, output = play.book("uninstall.yml")
    assert (code, changed(output)) == (0, 0), output


@long
def test_a_second_life_finds_the_cache(host, play):
    code, output = play.site()
    assert code == 0, output
    assert json.loads(host.check_output("kvp-admin report --json"))["bytes"]["live"] > 0
    host.check_output("mkdir /var/lib/kvpersist/lost+found && touch /var/lib/kvpersist/lost+found/one")
    code, output = play.book("uninstall.yml", kvp_uninstall_cache_root="/var/lib/kvpersist")
    assert code == 0, output
    assert host.check_output("find /var/lib/kvpersist -type f -printf %%P") == "lost+found/one"
    assert host.mount_point("/var/lib/kvpersist").exists
