"""What the store promises, on the real server: nothing damaged is served, the budget holds, a full disk heals.

A chunk of this model (256 tokens of float32) takes 11.8 MB on the disk. What is marked long runs in `make test-all`;
`make test` shows the same without vLLM (tests/serving/store_contract.py) and with a small model (molecule/faults).
"""

import json
import re
import time

import pytest
from play import figure, long, told

ROOT = "/var/lib/kvpersist"
URL = "http://127.0.0.1:8080"
BUDGET = 150_000_000
CHUNK = 11796480
#: Tokens of a prompt that is two chunks long, and of the same chat some turns later.
SHORT, LONG = 600, 1500

#: One chunk each, and two for those that are swapped.
DAMAGE = {
    "flipped": "printf x | dd of={0} bs=1 seek=100000 conv=notrunc status=none",
    "truncated": "truncate -s 5000 {0}",
    "extended": "truncate -s +4096 {0}",
    "empty": "truncate -s 0 {0}",
    "swapped": "cp {0} /root/one && cp {1} {0} && cp /root/one {1}",
    "another layout": "printf '\\377' | dd of={0} bs=1 seek=24 conv=notrunc status=none",
    "unreadable": "chown root {0} && chmod 0000 {0}",
}


@pytest.fixture
def store(host):
    return Store(host)


@pytest.fixture(autouse=True)
def starts(host):
    """More starts in ten minutes than the unit allows; the limit counts from the last reset."""
    host.check_output("systemctl reset-failed kvpersist-lmcache kvpersist-vllm")


class Store:
    """The cache root and the server of the host."""

    def __init__(self, host):
        self.host = host

    def chunks(self):
        """Names of the chunk files, least recently used first."""
        return self.host.check_output(f"cd {ROOT} && ls -tr | grep '[.]bin$' || true").split()

    def live_bytes(self):
        return int(self.host.check_output(f"du -c --block-size=1 {ROOT}/*.bin | tail -n 1").split()[0])

    def all_bytes(self):
        """What du says of everything in the root; directories themselves count for nothing."""
        return int(
            self.host.check_output(f"find {ROOT} -type f -printf '%b\\n' | awk '{{s += $1}} END {{print s * 512}}'")
        )

    def metric(self, name, **labels):
        """A figure of the server's own /metrics; 0 when it is not there."""
        return figure(self.host.check_output(f"curl -s {URL}/metrics"), name, **labels)

    def restart(self, *units):
        self.host.check_output("systemctl restart " + " ".join(units or ["kvpersist-lmcache"]))
        self.wait_open()

    def wait_open(self):
        """Until vLLM is registered with this server and the gate is open for it."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(1)
            status = self.host.run(f"curl -s {URL}/status")
            if '"model_name"' in status.stdout and self.metric("kvp_admitted") == 1:
                return
        raise AssertionError(self.host.check_output("kvp-admin status || true"))


@long
def test_damaged_chunks_are_misses_and_heal(play, store):
    """All in one chat: the answer stays right, the chunks before them are served, and the next store heals."""
    chat = {"conversation": 500, "prompt_tokens": 3500}
    served = play.chat(**{**chat, "prompt_tokens": SHORT})["prompt_tokens"] // 256 * 256
    before = set(store.chunks())
    control = play.chat(**chat)
    whole = control["prompt_tokens"] // 256 * 256
    names = [name for name in store.chunks() if name not in before]
    assert len(names) > len(DAMAGE)
    play.host.check_output("systemctl stop kvpersist-vllm kvpersist-lmcache")
    left = iter(names)
    for damage, command in DAMAGE.items():
        names_of_it = [next(left) for _ in range(2 if damage == "swapped" else 1)]
        play.host.check_output(f"cd {ROOT} && " + command.format(*names_of_it))
    play.host.check_output("systemctl start kvpersist-lmcache kvpersist-vllm")
    store.wait_open()
    answer = play.chat(**chat)
    assert answer["token_ids"] == control["token_ids"]
    assert served <= answer["cached_tokens"] < whole
    # All but the unreadable one were moved aside, both of the swapped too, and written again.
    assert store.metric("kvp_checksum_misses") == store.metric("kvp_healed_chunks") == len(DAMAGE)
    assert store.metric("kvp_failed_loads", reason="EACCES") == 1
    assert 0 < json.loads(play.host.check_output("kvp-admin report --json"))["bytes"]["quarantine"] <= 0.01 * 4e9
    assert play.host.run("kvp-admin verify").rc == 0

    play.host.check_output("systemctl stop kvpersist-vllm kvpersist-lmcache")
    play.host.check_output(f"cd {ROOT} && rm {names[0]} && mkdir {names[0]} && ln -sf /nowhere {names[1]}")
    play.host.check_output("systemctl start kvpersist-lmcache kvpersist-vllm")
    store.wait_open()
    answer = play.chat(**chat)
    assert answer["token_ids"] == control["token_ids"]
    assert served <= answer["cached_tokens"] < whole
    assert store.metric("kvp_checksum_misses") + store.metric("kvp_failed_loads") == 0
    assert store.metric("kvp_failed_stores", reason="EISDIR") == 1  # the link was replaced
    play.host.check_output(f"rmdir {ROOT}/{names[0]}")
    play.host.check_output("kvp-admin cleanup --corrupt --apply")
    assert play.host.check_output(f"ls {ROOT}/.kvpersist/quarantine") == ""


def test_a_lowered_budget_is_refused_with_what_to_do(play, store):
    """Case 10: what lies there counts at once."""
    play.chat(conversation=599, prompt_tokens=2200)  # so that more lies there, whatever ran before
    used = store.all_bytes()
    assert used > BUDGET
    code, output = play.site(kvp_l2_size_gb=BUDGET / 1e9)
    assert code != 0
    assert "kvp_l2_size_gb is 0.15" in told(output)
    assert "kvp-admin cleanup --to-budget 0.15 --apply" in told(output)
    assert store.all_bytes() == used
    play.host.check_output("kvp-admin cleanup --to-budget 0.15 --apply")
    code, output = play.site("--tags", "lmcache", kvp_l2_size_gb=BUDGET / 1e9)
    assert code == 0, output
    store.wait_open()


@long
def test_over_five_restarts_the_disk_never_holds_more_than_the_budget(play, store):
    assert store.metric("kvp_budget_bytes") == BUDGET
    evicted = 0
    for restart in range(5):
        play.chat(conversation=600 + restart, prompt_tokens=2200)
        assert store.all_bytes() <= BUDGET
        assert store.metric("kvp_disk_bytes", **{"class": "live"}) == store.live_bytes()
        evicted += store.metric("kvp_evicted_chunks")
        store.restart()
        assert store.metric("kvp_disk_bytes", **{"class": "live"}) == store.live_bytes()
    assert evicted > 15


@long
def test_starting_deletes_nothing_however_full(play, store):
    """Above the watermark: only the first store makes room."""
    play.host.check_output("systemctl stop kvpersist-lmcache")
    names = store.chunks()
    extra = 0
    while store.all_bytes() + CHUNK < BUDGET:
        copy = re.sub(r"[0-9a-f]{8}[.]bin$", f"{extra:08x}.bin", names[0])
        play.host.check_output(f"cp --preserve=all {ROOT}/{names[0]} {ROOT}/{copy}")
        extra += 1
    play.host.check_output(f"fallocate -l {int(0.97 * BUDGET) - store.all_bytes()} {ROOT}/filler")
    assert store.all_bytes() > 0.95 * BUDGET
    before = store.chunks()
    play.host.check_output("systemctl start kvpersist-lmcache")
    time.sleep(10)
    assert store.chunks() == before
    store.wait_open()
    play.chat(conversation=700, prompt_tokens=SHORT)
    assert store.all_bytes() <= BUDGET
    assert len(store.chunks()) < len(before)
    play.host.check_output(f"rm {ROOT}/filler")


@long
def test_a_full_disk_refuses_stores_and_heals_by_itself(play, store):
    """The server answers, vLLM serves, cleanup works on the full disk, storing resumes without a restart."""
    pid = play.host.check_output("systemctl show -p MainPID kvpersist-lmcache kvpersist-vllm")
    dead = re.sub(r"kvp-.{8}", "kvp-00000000", store.chunks()[0])[: -len("00.bin")]
    for number in range(20):  # a model of before, until nothing more goes on the disk
        play.host.run(f"fallocate -l 500M {ROOT}/{dead}{number:02x}.bin")
    play.host.run(f"dd if=/dev/zero of={ROOT}/{dead}ff.bin bs=64k status=none")
    assert int(play.host.check_output(f"df --output=avail {ROOT} | tail -n 1")) < 1000  # KiB
    refused = store.metric("kvp_refused_stores")
    assert play.chat(conversation=710, prompt_tokens=LONG)["text"]
    assert store.metric("kvp_refused_stores", reason="budget") > refused
    assert play.host.check_output(f"curl -s -o /dev/null -w '%{{http_code}}' {URL}/healthcheck") == "200"
    assert "kvp-admin cleanup --dead" in play.host.check_output("kvp-admin report")
    assert "nothing was" in play.host.check_output("kvp-admin cleanup --dead")
    play.host.check_output("kvp-admin cleanup --dead --apply")
    assert not [name for name in store.chunks() if name.startswith(dead)]
    play.chat(conversation=711, prompt_tokens=SHORT)
    time.sleep(2)
    before = set(store.chunks())
    play.chat(conversation=712, prompt_tokens=LONG)
    assert len(set(store.chunks()) - before) >= 4
    assert play.host.check_output("systemctl show -p MainPID kvpersist-lmcache kvpersist-vllm") == pid


@long
def test_a_read_only_remount_stops_stores_alone(play, store):
    """Case 17: reported, and nothing is left pending."""
    before = store.metric("kvp_failed_stores")
    play.host.check_output(f"mount -o remount,ro {ROOT}")
    try:
        assert play.chat(conversation=720, prompt_tokens=LONG)["text"]
        assert store.metric("kvp_failed_stores", reason="EROFS") > before
    finally:
        play.host.check_output(f"mount -o remount,rw {ROOT}")
    before = set(store.chunks())
    play.chat(conversation=721, prompt_tokens=SHORT)
    assert set(store.chunks()) - before


@long
def test_kill_9_while_it_stores(play, store):
    """Twenty times in the contract (tests/serving/store_contract.py); here with the whole chain."""
    for round_ in range(3):
        play.host.check_output(
            f"(sleep {0.6 + round_ * 0.7}; systemctl kill --signal KILL kvpersist-lmcache) >/dev/null 2>&1 &"
        )
        assert play.chat(conversation=730 + round_, prompt_tokens=LONG)["text"]
        store.wait_open()
    assert play.host.run("kvp-admin verify").rc == 0
    unfinished = store.chunks()[0] + ".tmp.0123456789abcdef"
    play.host.check_output(
        f"cp {ROOT}/{store.chunks()[0]} {ROOT}/{unfinished} && touch -d '2 hours ago' {ROOT}/*.tmp.*"
    )
    assert json.loads(play.host.check_output("kvp-admin report --json"))["bytes"]["temp"] > 0
    play.host.check_output("kvp-admin cleanup --temp --apply")
    assert json.loads(play.host.check_output("kvp-admin report --json"))["bytes"]["temp"] == 0
    for round_ in range(3):
        chat = {"conversation": 730 + round_, "prompt_tokens": LONG}
        control = play.chat(**chat, cache_salt=f"control-{time.time_ns()}")
        assert play.chat(**chat)["token_ids"] == control["token_ids"]


@pytest.mark.parametrize("lossy", ["fp8", *(pytest.param(name, marks=long) for name in ("turboquant", "lbq", "asym"))])
def test_a_lossy_codec_ends_the_server_once(host, lossy):
    host.check_output(f"sed -i.kept s/LMCACHE_L2_SERDE=.*/LMCACHE_L2_SERDE={lossy}/ /etc/kvpersist/cache.env")
    try:
        assert host.run("systemctl restart kvpersist-lmcache").rc != 0
        shown = host.check_output("systemctl show -p Result,ExecMainStatus,ActiveState kvpersist-lmcache").split()
        assert sorted(shown) == ["ActiveState=failed", "ExecMainStatus=78", "Result=exit-code"]
        text = host.check_output("journalctl -b -o cat -u kvpersist-lmcache -n 30")
        assert f"codec is '{lossy}'; allowed: none, zstd, lz4" in text
        time.sleep(6)  # longer than RestartSec
        assert host.run("systemctl is-active kvpersist-lmcache").stdout.strip() == "failed"
    finally:
        host.check_output("mv /etc/kvpersist/cache.env.kept /etc/kvpersist/cache.env")
        host.check_output("systemctl reset-failed kvpersist-lmcache")
    host.check_output("systemctl start kvpersist-lmcache")


@long
def test_zstd_shrinks_real_kv_by_the_reported_ratio(play, store):
    """bfloat16 KV of a trained model; the frames of before are read on, whatever the codec."""
    code, output = play.site(
        kvp_l2_serde="zstd",
        kvp_l2_size_gb=BUDGET / 1e9,
        kvp_identity_dtype="bfloat16",
        kvp_identity_kv_cache_dtype="bfloat16",
    )
    assert code == 0, output
    before = set(store.chunks())
    counted = [store.metric("kvp_raw_bytes"), store.metric("kvp_stored_bytes")]
    answer = play.chat(conversation=800, prompt_tokens=LONG)
    new = [f"{ROOT}/{name}" for name in store.chunks() if name not in before]
    assert len(new) >= 4
    raw, packed = store.metric("kvp_raw_bytes") - counted[0], store.metric("kvp_stored_bytes") - counted[1]
    disk = int(play.host.check_output(f"du -c --block-size=1 {' '.join(new)} | tail -n 1").split()[0])
    assert raw == len(new) * CHUNK / 2
    assert raw / packed > 1.4
    assert raw / disk == pytest.approx(raw / packed, rel=0.005)  # the header and the last page
    store.restart("kvpersist-lmcache", "kvpersist-vllm")
    again = play.chat(conversation=800, prompt_tokens=LONG)
    assert again["cached_tokens"] > 0.8 * again["prompt_tokens"]
    assert again["token_ids"] == answer["token_ids"]
