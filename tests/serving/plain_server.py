"""`lmcache server` without this collection's roles, with the adapter JSON of docs/en/store.md on standard input.

Runs inside the serving image. A lossy codec ends it with the reason; without one it answers with the store's metrics.
"""

import os
import subprocess
import sys
import time
import urllib.request

COMMAND = ["lmcache", "server", "--l1-size-gb", "0.5", "--eviction-policy", "LRU", "--l2-adapter", sys.stdin.read()]
METRICS = "http://127.0.0.1:8080/metrics"


def metrics(server):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(METRICS, timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the server did not answer")


def main():
    lossy = subprocess.run(
        COMMAND, env={**os.environ, "LMCACHE_L2_SERDE": "fp8"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert lossy.returncode != 0
    assert "codec is 'fp8'; allowed: none, zstd, lz4" in lossy.stderr
    server = subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert "\nkvp_budget_bytes{" in metrics(server)
    finally:
        server.terminate()
        server.wait(30)
    print("ok: a plain lmcache server takes the adapter of the docs, and no lossy codec")


if __name__ == "__main__":
    main()
