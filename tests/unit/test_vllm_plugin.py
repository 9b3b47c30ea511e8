"""The plugin's two wrappers, on stand-ins for classes of LMCache and vLLM; the real ones are in molecule/faults."""

import asyncio
import importlib.util
import types

import pytest
from conftest import COLLECTION


def module(name):
    file = COLLECTION / f"roles/kvp_vllm/files/vllm_plugin/{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


plugin, key = module("kvpersist_vllm"), module("kvpersist_key")


class Adapter:
    """What LMCacheMPWorkerAdapter does: a request without a store is done with the moment it ends."""

    def __init__(self):
        self.retrieve_futures, self.store_futures, self._dropped_retrieves = {}, {}, set()
        self.loaded, self.waiting = set(), set()

    def get_finished(self, ended):
        self.waiting |= ended & self.store_futures.keys()
        stored = (ended | self.waiting) - self.store_futures.keys()
        self.waiting -= stored
        loaded, self.loaded = self.loaded, set()
        for request in loaded:
            self.retrieve_futures.pop(request, None)
        return stored, loaded


class Repaired(Adapter):
    get_finished = plugin.once(Adapter.get_finished)


def test_a_request_that_ends_while_it_is_loaded_is_reported_once():
    adapter = Repaired()
    adapter.retrieve_futures["a"] = 1
    assert adapter.get_finished({"a", "b"}) == ({"b"}, set())
    assert adapter.get_finished(set()) == (set(), set())
    adapter.loaded = {"a"}
    assert adapter.get_finished({"a"}) == (set(), {"a"})
    assert adapter.get_finished(set()) == (set(), set())


def test_it_is_not_reported_before_its_store_is_done():
    """Of a request that was preempted and loaded again."""
    adapter = Repaired()
    adapter.retrieve_futures["a"], adapter.store_futures["a"] = 1, 1
    assert adapter.get_finished({"a"}) == (set(), set())
    adapter.loaded = {"a"}
    assert adapter.get_finished(set()) == (set(), set())
    del adapter.store_futures["a"]
    assert adapter.get_finished(set()) == (set(), {"a"})


def test_what_ends_as_usual_is_reported_as_before():
    adapter, usual = Repaired(), Adapter()
    for each in (adapter, usual):
        each.store_futures["s"] = 1
        each.retrieve_futures["l"], each.loaded = 1, {"l"}
    for ended in ({"s"}, set(), {"l"}):
        assert adapter.get_finished(ended) == usual.get_finished(ended)
    for each in (adapter, usual):
        del each.store_futures["s"]
    assert adapter.get_finished(set()) == usual.get_finished(set()) == ({"s"}, set())


@pytest.mark.parametrize(
    ("recving", "sending", "heard"),
    [
        ({"here"}, None, ({"here"}, set())),
        ({"gone"}, {"gone"}, (set(), set())),
        ({"ended"}, {"ended"}, ({"ended"}, set())),
        (None, {"ended", "here"}, (set(), {"ended", "here"})),
    ],
)
def test_the_scheduler_hears_of_what_it_has(recving, sending, heard):
    seen = []
    update = plugin.known(lambda self, output: seen.append((output.finished_recving, output.finished_sending)))
    requests = {
        name: types.SimpleNamespace(is_finished=lambda name=name: name == "ended") for name in ("here", "ended")
    }
    update(
        types.SimpleNamespace(requests=requests),
        types.SimpleNamespace(finished_recving=recving, finished_sending=sending),
    )
    assert seen == [heard]


def test_it_does_nothing_without_the_cache(monkeypatch):
    monkeypatch.delenv("KVP_CACHING", raising=False)
    plugin.register()


def asked(monkeypatch, method="POST", path="/invocations", given="", kind="http"):
    """What the middleware answers, or "passed"."""
    sent = []

    async def app(scope, receive, send):
        sent.append({"status": "passed"})

    async def send(message):
        sent.append(message)

    monkeypatch.setenv("VLLM_API_KEY", "sk-key")
    headers = [(b"host", b"x"), (b"authorization", given.encode())] if given else []
    scope = {"type": kind, "method": method, "path": path, "headers": headers}
    asyncio.run(key.KeyForEverything(app)(scope, None, send))
    return sent[0].get("status", sent[0].get("type"))


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer ", "Bearer sk-ke", "Bearer sk-key ", "Basic sk-key", "sk-key"])
def test_without_the_key_nothing_is_answered(monkeypatch, given):
    assert asked(monkeypatch, given=given) == 401
    assert asked(monkeypatch, "GET", "/tokenizer_info", given) == 401
    assert asked(monkeypatch, kind="websocket", given=given) == "websocket.close"


def test_with_the_key_all_is_and_probes_need_none(monkeypatch):
    assert asked(monkeypatch, given="Bearer sk-key") == asked(monkeypatch, given="bearer sk-key") == "passed"
    for path in ("/health", "/metrics", "/ping", "/version"):
        assert asked(monkeypatch, "GET", path) == "passed"
    assert asked(monkeypatch, "POST", "/ping") == asked(monkeypatch, "GET", "/health/") == 401
    assert asked(monkeypatch, "OPTIONS") == asked(monkeypatch, kind="lifespan") == "passed"
