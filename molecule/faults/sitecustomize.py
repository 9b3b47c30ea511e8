"""Faults inside the lmcache server, chosen by KVP_FAULT; a drop-in of the unit puts this file on its PYTHONPATH.

`die-evicting`, `die-writing` and `die-publishing` kill the process, once, at the worst moment. `clock` adds the
seconds of a file to the time of day. `no-checks` is a build with the protection taken out: it has to be found out.
"""

import os
import signal
import sys
import time

FAULT = os.environ.get("KVP_FAULT", "")
#: The service may write here; it is there once the process was killed.
MARKER = "/var/cache/kvpersist/killed"


def die_at(name, times, before):
    """Kill the process at that call of os.NAME on a chunk; `before` does half of what the call would do."""
    really, seen = getattr(os, name), []

    def call(*words, **more):
        if name == "pwritev" or ".bin" in str(words[0]):
            seen.append(words)
            if len(seen) >= times and not os.path.exists(MARKER):
                before(really, words)
                open(MARKER, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return really(*words, **more)

    setattr(os, name, call)


def half(pwritev, words):
    file, parts, offset = words
    pwritev(file, [part[: len(part) // 2 // 4096 * 4096] for part in parts], offset)


if FAULT == "die-evicting":
    die_at("unlink", 5, lambda unlink, words: unlink(*words))
elif FAULT == "die-writing":
    die_at("pwritev", 5, half)
elif FAULT == "die-publishing":
    die_at("rename", 5, lambda rename, words: None)
elif FAULT == "no-checks":
    from kvpersist import objects

    objects.expect = objects.check = lambda *words: None
elif FAULT == "clock":

    def shifted(now):
        def call():
            with open("/srv/faults/clock") as seconds:
                return now() + int(seconds.read() or 0) * (10**9 if now is NANOSECONDS else 1)

        return call

    NANOSECONDS = time.time_ns
    time.time, time.time_ns = shifted(time.time), shifted(time.time_ns)
elif FAULT:
    sys.exit(f"KVP_FAULT is {FAULT}")
