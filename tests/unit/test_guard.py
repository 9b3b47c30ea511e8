"""Whose a loopback connection is, from the kernel's real table; and what others are refused."""

import asyncio
import importlib.util
import os
import socket
import sys
import types

import pytest
from conftest import COLLECTION

FILE = COLLECTION / "roles/kvp_lmcache/files/kvpersist_lmcache/guard.py"
spec = importlib.util.spec_from_file_location("kvpersist_guard", FILE)
guard = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guard)


@pytest.fixture
def connection():
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    yield client, server
    for each in (client, server, listener):
        each.close()


def test_the_kernel_says_whose_a_connection_is(connection):
    client, server = connection
    ends = client.getsockname(), server.getsockname()
    assert guard.owner(*ends) == os.getuid()
    assert guard.owner(ends[0], ("127.0.0.1", 1)) is None
    client.close()
    assert guard.owner(*ends) is None  # not 0, which the kernel shows for what is closing


def answer(connection, method="POST", path="/cache/clear", **more):
    """Status that the guard gives, or "passed"."""
    client, server = connection
    sent = []

    async def app(scope, receive, send):
        sent.append({"status": "passed"})

    async def send(message):
        sent.append(message)

    ends = {"client": client.getsockname(), "server": server.getsockname()}
    scope = {"type": "http", "method": method, "path": path, "headers": [], **ends}
    asyncio.run(guard.Guard(app)({**scope, **more}, None, send))
    return sent[0].get("status", sent[0].get("type"))


def test_the_account_of_the_server_and_root_pass(connection, monkeypatch):
    assert answer(connection) == "passed"
    monkeypatch.setattr(guard.os, "getuid", lambda: 12345)
    monkeypatch.setattr(guard, "owner", lambda *ends: 0)
    assert answer(connection) == "passed"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/metrics", "passed"),
        ("GET", "/status", "passed"),
        ("HEAD", "/healthcheck", "passed"),
        ("POST", "/metrics", 403),
        ("POST", "/metrics/reset", 403),
        ("GET", "/loglevel", 403),
        ("GET", "/cache/objects", 403),
        ("GET", "/status/", 403),
        ("DELETE", "/cache/objects", 403),
        ("POST", "/run_script", 403),
    ],
)
def test_others_read_figures_and_no_more(connection, monkeypatch, method, path, status):
    monkeypatch.setattr(guard, "owner", lambda *ends: 12345)
    assert answer(connection, method, path) == status


@pytest.mark.parametrize("client", [None, ("::1", 1, 0, 0), ("testclient", 1), ("127.0.0.1", 1)])
def test_whoever_cannot_be_told_is_another(connection, client):
    assert answer(connection, client=client) == 403


def test_what_a_header_says_of_the_client_is_not_believed(connection):
    """uvicorn would write it into the scope; the unit forbids that, and this is the second lock."""
    assert answer(connection, headers=[(b"x-forwarded-for", b"127.0.0.1:1")]) == 403
    assert answer(connection, headers=[(b"accept", b"*/*")]) == "passed"


def test_websockets_are_closed_and_the_lifespan_passes(connection, monkeypatch):
    assert answer(connection, type="lifespan") == "passed"
    monkeypatch.setattr(guard, "owner", lambda *ends: 12345)
    assert answer(connection, type="websocket") == "websocket.close"


def test_it_goes_before_the_server_once(monkeypatch):
    added = []
    app = types.SimpleNamespace(middleware_stack=None, add_middleware=added.append)
    assert not guard.install()
    monkeypatch.setitem(sys.modules, "lmcache.v1.multiprocess.http_server", types.SimpleNamespace(app=app))
    assert guard.install()
    assert added == [guard.Guard]  # it has not started yet
    app.middleware_stack = print
    assert guard.install()
    assert guard.install()
    assert app.middleware_stack.app is print
