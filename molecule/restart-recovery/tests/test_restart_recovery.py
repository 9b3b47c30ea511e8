"""The main promise, broken on purpose: restarts, kill -9, no cache server."""

import json

from play import long, told


def test_the_cache_survives_restarts_and_kill_9(play, tmp_path):
    code, output = play.book(
        "recovery.yml", kvp_verify_recovery_signals=["SIGTERM", "SIGKILL"], kvp_verify_report_dir=str(tmp_path)
    )
    assert code == 0, output
    print((tmp_path / f"recovery-{play.name}.txt").read_text())
    rows = {row["scenario"]: row for row in json.loads((tmp_path / f"recovery-{play.name}.json").read_text())["rows"]}
    assert list(rows) == ["cold", "another chat", "A", "A'", "B", "A kill -9", "A' kill -9", "B kill -9"]
    assert not rows["another chat"]["same"]
    for name, row in rows.items():
        if name.startswith(("A", "B")):
            assert row["same"]
            assert row["cached_tokens"] > 0.9 * row["prompt_tokens"]
        if name.startswith(("A k", "B")):
            assert row["l1_tokens"] + row["l2_tokens"] > 0.9 * row["prompt_tokens"]
        if name.startswith("B"):
            assert row["l2_tokens"] > 0.9 * row["prompt_tokens"]


def test_recovery_fails_when_the_files_are_gone(play, tmp_path):
    """The proof itself can fail: without the files, B is a recompute and says so."""
    play.host.check_output("systemctl stop kvpersist-vllm kvpersist-lmcache")
    play.host.check_output("mkdir -p /etc/systemd/system/kvpersist-lmcache.service.d")
    play.host.check_output(
        "printf '[Service]\\nExecStartPre=/usr/bin/find /var/lib/kvpersist -name *.bin -delete\\n'"
        " > /etc/systemd/system/kvpersist-lmcache.service.d/lose.conf && systemctl daemon-reload"
    )
    try:
        play.host.check_output("systemctl start kvpersist-lmcache kvpersist-vllm")
        code, output = play.book(
            "recovery.yml",
            kvp_verify_recovery_scenarios=["B"],
            kvp_verify_recovery_tokens=1500,
            kvp_verify_report_dir=str(tmp_path),
        )
        assert code != 0
        assert "Not proved: B" in told(output)
        assert "they did not come from disk" in (tmp_path / f"recovery-{play.name}.txt").read_text()
    finally:
        play.host.check_output("rm -r /etc/systemd/system/kvpersist-lmcache.service.d && systemctl daemon-reload")


@long
def test_without_the_cache_server_it_serves_uncached_and_says_so(play):
    drop_in = "/run/systemd/system/kvpersist-lmcache.service.d"
    play.host.check_output(
        f"mkdir -p {drop_in} && printf '[Unit]\\nConditionPathExists=/never\\n' > {drop_in}/off.conf"
    )
    play.host.check_output("systemctl daemon-reload && systemctl stop kvpersist-lmcache")
    try:
        play.host.check_output("systemctl restart kvpersist-vllm")
        answer = play.chat(conversation=78, prompt_tokens=300)
        assert answer["text"]
        state = json.loads(play.host.file("/run/kvpersist/vllm.json").content_string)
        assert state["caching"] is False
        assert "SERVING UNCACHED" in play.host.check_output(
            "journalctl -o cat -u kvpersist-vllm -n 200 | grep UNCACHED"
        )
        code, output = play.site("--tags", "verify")
        assert code != 0
        assert "kvpersist-lmcache is inactive" in told(output)
    finally:
        play.host.check_output(f"rm -r {drop_in} && systemctl daemon-reload")
    play.host.check_output("systemctl start kvpersist-lmcache")
    code, output = play.site("--tags", "verify")
    assert code != 0
    assert "serves UNCACHED since" in told(output)
    play.host.check_output("systemctl restart kvpersist-vllm")
    code, output = play.site("--tags", "verify")
    assert code == 0, output


def test_a_cache_server_restarted_before_the_first_long_chat_is_used_again(play):
    """LMCache's workers watch the server only after their first store; priming starts the watch."""
    lmcache = play.units()["kvpersist-lmcache"]
    play.host.check_output("systemctl restart kvpersist-vllm")
    assert play.units()["kvpersist-lmcache"] == lmcache  # a vLLM that ended by itself leaves nothing there
    mapped = (
        "grep -c 'lmcache_kv_.*(deleted)' /proc/$(systemctl show -p MainPID --value kvpersist-lmcache)/maps || true"
    )
    assert play.host.check_output(mapped) == "0"
    play.host.check_output("systemctl restart kvpersist-lmcache")
    code, output = play.site("--tags", "verify")
    assert code == 0, output
    play.chat(conversation=79, prompt_tokens=700)
    stored = "curl -s http://127.0.0.1:8080/status | grep -o '\"stored_object_count\":[0-9]*'"
    assert play.host.check_output(stored) != '"stored_object_count":0'
