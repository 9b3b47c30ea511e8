"""Who may ask the HTTP port for more than figures: root, and the account that the server runs as.

LMCache 0.5.6 asks nobody for a password, so every account of the host could delete what is in memory, list the
chunks and change the settings (POST /cache/clear, DELETE /cache/objects, GET /loglevel?level=...). A request comes
over loopback, so the kernel knows whose it is. The ZMQ port, which moves the KV itself, has no such guard.

uvicorn believes X-Forwarded-For from loopback, in which anybody could name another's connection: the unit sets
FORWARDED_ALLOW_IPS, and a request with such a header is nobody's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from typing import Any, Awaitable, Callable, Optional, Tuple

#: What anybody may read: figures, and whether the server is well.
PUBLIC = frozenset({"/", "/healthcheck", "/status", "/metrics"})
ESTABLISHED = "01"
REFUSAL = b"kvpersist: only root and the account of this server may ask for that\n"

Address = Tuple[str, int]


def owner(client: Address, server: Address, table: str = "/proc/net/tcp") -> Optional[int]:
    """Uid of the open IPv4 connection from ``client`` to ``server``; None when there is none.

    A connection that its client has closed already has no owner that could be told (the kernel says 0).
    """
    wanted = [_hexadecimal(client), _hexadecimal(server), ESTABLISHED]
    with open(table, encoding="ascii") as lines:
        for line in lines:
            words = line.split()
            if words[1:4] == wanted:
                return int(words[7])
    return None


def _hexadecimal(address: Address) -> str:
    host, port = address
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"


class Guard:
    """ASGI application in front of the server's own."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or await self._allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})
        else:
            await send({"type": "websocket.close", "code": 1008})

    @staticmethod
    async def _allowed(scope: Any) -> bool:
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] in PUBLIC:
            return True
        if any(b"forwarded" in name.lower() for name, _ in scope["headers"]):
            return False
        try:
            ends = tuple(scope["client"][:2]), tuple(scope["server"][:2])
            return await asyncio.to_thread(owner, *ends) in (0, os.getuid())  # the table of a busy host is long
        except (OSError, TypeError, ValueError):  # no IPv4 connection of this host
            return False


def install() -> bool:
    """Put the guard before the HTTP server of this process; False where there is none."""
    http_server = sys.modules.get("lmcache.v1.multiprocess.http_server")
    if http_server is None:
        return False
    app = http_server.app
    if app.middleware_stack is None:
        app.add_middleware(Guard)
    elif not isinstance(app.middleware_stack, Guard):  # it has started, and takes no more in the usual way
        app.middleware_stack = Guard(app.middleware_stack)
    return True
