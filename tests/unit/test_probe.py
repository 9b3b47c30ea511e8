"""The chat probe against a stand-in that streams as vLLM does."""

import http.server
import json
import threading

import pytest
from ansible_collections.sikkatu.kvpersist.plugins.module_utils.kvpersist import probe

METRICS = """# HELP x y
lmcache_mp_lookup_hit_l1_tokens_total{{model_name="a"}} {l1}
lmcache_mp_lookup_hit_l1_tokens_total{{model_name="b"}} 1.0
lmcache_mp_lookup_hit_l2_tokens_total{{model_name="a"}} {l2}
"""


class Server(http.server.BaseHTTPRequestHandler):
    hits = {"l1": 100.0, "l2": 10.0}
    add = {"l1": 0.0, "l2": 512.0}
    busy = 0
    answer = ("data: {}\n\n",)

    def reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        if self.path == "/metrics":
            self.reply(METRICS.format(**Server.hits))
        else:
            queue = {"pending_keys_count": Server.busy, "in_flight_task_count": 0}
            Server.busy = max(0, Server.busy - 1)
            self.reply(json.dumps({"storage_manager": {"store_controllers": {"_default": queue}}}))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        Server.hits = {k: v + Server.add[k] for k, v in Server.hits.items()}
        self.reply("".join(f"data: {json.dumps(e)}\n\n" for e in Server.answer) + "data: [DONE]\n\n")

    def log_message(self, *_):
        pass


EVENTS = (
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "Riga"}, "token_ids": [7, 8]}]},
    {"choices": [{"delta": {"content": "."}, "token_ids": [9]}]},
    {"choices": [], "usage": {"prompt_tokens": 600, "prompt_tokens_details": {"cached_tokens": 512}}},
)


@pytest.fixture
def server():
    Server.hits, Server.add, Server.busy, Server.answer = {"l1": 100.0, "l2": 10.0}, {"l1": 0.0, "l2": 512.0}, 3, EVENTS
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


def ask(url, lmcache=None):
    return probe.probe(lmcache or url, url=url, model="m", messages=probe.conversation(1, 100))


def test_evidence_is_the_difference_of_the_counters(server):
    result = ask(server)
    assert result["text"] == "Riga."
    assert result["token_ids"] == [7, 8, 9]
    assert (result["prompt_tokens"], result["cached_tokens"]) == (600, 512)
    assert (result["l1_tokens"], result["l2_tokens"]) == (0, 512)
    assert result["stored_chunks"] == 0
    assert result["settled"] is True
    assert Server.busy == 0


def test_counters_that_started_anew_count_from_zero(server):
    Server.add = {"l1": -90.0, "l2": 0.0}
    result = ask(server)
    assert (result["l1_tokens"], result["l2_tokens"]) == (11, 0)


def test_without_the_lmcache_server_there_is_no_evidence(server):
    result = ask(server, "http://127.0.0.1:1")
    assert (result["l1_tokens"], result["stored_chunks"], result["settled"]) == (None, None, False)


def test_an_answer_without_tokens_is_an_error(server):
    Server.answer = EVENTS[:1]
    with pytest.raises(probe.ProbeError, match="no tokens"):
        ask(server)


def test_conversations():
    one, again, other = (probe.conversation(seed, 3400) for seed in (1, 1, 2))
    assert one == again
    assert one[0] != other[0]
    assert [m["role"] for m in one[:2]] == ["user", "assistant"]
    assert one[-1]["role"] == "user"
    assert len(probe.conversation(1, 1)) == 3
