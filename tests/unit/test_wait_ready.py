"""The readiness check: first answer, deadline, and the end of the process it waits for."""

import http.server
import os
import subprocess
import sys
import threading
import time

from conftest import COLLECTION

SCRIPT = COLLECTION / "roles/kvp/files/wait-ready"


def wait(seconds, pid, url):
    start = time.monotonic()
    done = subprocess.run([sys.executable, str(SCRIPT), str(seconds), str(pid), url], capture_output=True, text=True)
    return done, time.monotonic() - start


def test_returns_when_the_service_answers():
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done, _took = wait(10, os.getpid(), f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
    assert done.returncode == 0


def test_gives_up_at_the_deadline():
    done, took = wait(1, os.getpid(), "http://127.0.0.1:1/")
    assert done.returncode == 1
    assert "did not answer within 1 s" in done.stderr
    assert took < 10


def test_does_not_wait_for_a_dead_process():
    process = subprocess.Popen(["true"])
    process.wait()
    done, took = wait(60, process.pid, "http://127.0.0.1:1/")
    assert done.returncode == 1
    assert f"process {process.pid} ended" in done.stderr
    assert took < 10
