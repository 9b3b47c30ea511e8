"""Clients that stream chats while something is broken, and the recompute that their answers are held against.

    load.py run FILE CLIENTS [COUNT [NUMBER]]   until COUNT answers, or until FILE.stop is there; a line of JSON for
                                                each request. Another NUMBER (0 to 9) makes other chats.
    load.py check FILE                          recompute each chat of FILE, print what differs as JSON

Runs on the host, with the collection's probe.py beside it. Two clients each share
a prefix, which grows turn by turn.
"""

import http.client
import json
import os
import secrets
import sys
import threading
import time
import urllib.parse
import zlib

from probe import conversation

#: Seconds until a client gives a request up.
TIMEOUT = 120
#: Tokens of a chat, turn by turn; a chunk has 256.
TURNS = (700, 1200, 1700, 2300)
#: What vLLM answers, with status 500, to a request that comes while it stops and finishes the ones before.
STOPPING = b"cannot schedule new futures after shutdown"
#: What float32 and another order of additions may make of a logarithmic probability.
NEAR_TIE = 0.01


class Stopping(Exception):
    """vLLM did not take the request, since it is about to end: as good as a closed port."""


def ask(endpoint, seed, tokens, salt=""):
    """One chat at temperature 0: tokens, their likeliest alternatives, cached tokens, seconds."""
    where = urllib.parse.urlsplit(endpoint["url"])
    body = {
        "model": endpoint["model"],
        "messages": conversation(seed, tokens),
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 5,
        "return_tokens_as_token_ids": True,
        **({"cache_salt": salt} if salt else {}),
    }
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=TIMEOUT)
    started = time.time()
    ids, likely, usage = [], [], {}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            said = response.read(300)
            if response.status == 500 and STOPPING in said:
                raise Stopping
            raise http.client.HTTPException(f"{response.status}: {said!r}")
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                if choice.get("finish_reason") == "abort":  # it ended while this request was on its way to the engine
                    raise http.client.HTTPException("vLLM aborted it")
                ids += choice.get("token_ids") or []
                for token in (choice.get("logprobs") or {}).get("content") or []:
                    likely.append({top["token"].split(":")[1]: top["logprob"] for top in token["top_logprobs"]})
    finally:
        connection.close()
    if not usage:
        raise http.client.HTTPException("the answer broke off")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {"ids": ids, "likely": likely, "cached": cached, "started": started, "ended": time.time()}


def run(endpoint, file, clients, count, number):
    first = zlib.crc32(os.path.basename(file).encode()) % 10**8 * 100 + number * 10
    lock, answered = threading.Lock(), [0]

    def client(number):
        turn = 0
        while not os.path.exists(f"{file}.stop") and answered[0] < count:
            chat = {"seed": first + number // 2, "tokens": TURNS[turn % len(TURNS)]}
            started = time.time()
            try:
                record = ask(endpoint, **chat)
                turn += 1
            except ConnectionRefusedError:  # nobody was there to lose it
                time.sleep(0.2)
                continue
            except Stopping:
                record = {"stopping": True, "started": started, "ended": time.time()}
                time.sleep(0.2)
            except (OSError, ValueError, http.client.HTTPException) as error:
                record = {"lost": repr(error), "started": started, "ended": time.time()}
                time.sleep(0.2)
            with lock:
                answered[0] += "ids" in record
                output.write(json.dumps({**chat, **record}) + "\n")
                output.flush()

    with open(file, "a", encoding="utf-8") as output:
        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def verdict(record, control):
    """ "" for the recompute's tokens, "near" for another one of equals, else what is wrong."""
    for at, (here, there) in enumerate(zip(record["ids"], control["ids"])):
        if here != there:
            likely = control["likely"][at]
            gap = likely[str(there)] - likely.get(str(here), -99.0)
            return "near" if gap < NEAR_TIE else f"token {at} is {here}, {there} in the recompute, {gap:.3f} likelier"
    return "" if len(record["ids"]) == len(control["ids"]) else "another length"


def check(endpoint, file):
    with open(file, encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    answers = [record for record in records if "ids" in record]
    controls, verdicts = {}, []
    for record in answers:
        chat = record["seed"], record["tokens"]
        if chat not in controls:
            controls[chat] = ask(endpoint, *chat, salt=secrets.token_hex(8))
            if controls[chat]["cached"]:
                raise SystemExit("the recompute was served from a cache")
        verdicts.append(verdict(record, controls[chat]))
    return {
        "answers": len(answers),
        "chats": len(controls),
        "hits": sum(record["cached"] > 0 for record in answers),
        "near_ties": verdicts.count("near"),
        "wrong": [each for each in verdicts if each not in ("", "near")],
        "stopping": sum("stopping" in record for record in records),
        "lost": [record["lost"] for record in records if "lost" in record],
        "longest_seconds": round(max((record["ended"] - record["started"] for record in records), default=0), 1),
        "requests": [
            {key: record.get(key, 0) for key in ("started", "ended", "cached", "lost", "stopping", "tokens")}
            for record in records
        ],
    }


def main():
    with open("/etc/kvpersist/vllm.json", encoding="utf-8") as config:
        endpoint = json.load(config)["endpoint"]
    action, file, *more = sys.argv[1:]
    if action == "run":
        run(
            endpoint, file, int(more[0]), int(more[1]) if len(more) > 1 else 10**9, int(more[2]) if len(more) > 2 else 0
        )
    else:
        print(json.dumps(check(endpoint, file)))


if __name__ == "__main__":
    main()
