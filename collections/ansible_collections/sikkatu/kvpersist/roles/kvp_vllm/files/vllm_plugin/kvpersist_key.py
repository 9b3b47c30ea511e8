"""ASGI middleware of vLLM: whoever has no key reads whether it is well, and no more.

By itself vLLM 0.32.0 asks for the key below /v1, /v2, /inference and /cohere alone: /invocations generates without
it, and /tokenize, /pooling, /score and others answer. `vllm serve --middleware kvpersist_key.KeyForEverything`.
"""

import os
import secrets

#: What probes and scrapers ask, without a key as ever.
OPEN = frozenset({"/health", "/metrics", "/ping", "/version"})
REFUSAL = b'{"error": "Unauthorized"}'


class KeyForEverything:
    def __init__(self, app):
        self.app, self.key = app, os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] not in ("http", "websocket") or self._admitted(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(REFUSAL)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _admitted(self, scope):
        method = scope.get("method")
        if method == "OPTIONS" or (method in ("GET", "HEAD") and scope["path"] in OPEN):
            return True
        given = b"".join(value for name, value in scope["headers"] if name == b"authorization")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(key, self.key)
