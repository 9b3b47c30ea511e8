"""TTFT after a restart of both servers, from disk and by recompute: ttft_bench.py TOKENIZER ROOT OUT ADAPTER

Runs inside the serving image, with the real `lmcache server` and `vllm serve`. The model is generated: 32M
parameters of Llama in bfloat16, the same with every run; its answers mean nothing, its prefill costs what it costs.
Writes one JSON object: pairs of seconds, and where the time of a hit goes.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from statistics import median

from kvpersist import probe, render

TOKENIZER, ROOT, OUT = (pathlib.Path(path) for path in sys.argv[1:4])
ADAPTER = sys.argv[4]
# The conversation is some tokens shorter than asked for: 12300 give 10k.
TOKENS, PAIRS = int(os.environ.get("BENCH_TOKENS", "12300")), int(os.environ.get("BENCH_PAIRS", "5"))
MODEL, NAME = pathlib.Path("/tmp/model"), "bench-32m"
VLLM, LMCACHE = "http://127.0.0.1:8000", "http://127.0.0.1:8080"


def make_model():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=64,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        dtype="bfloat16",
        bos_token_id=1,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(MODEL)
    for file in TOKENIZER.glob("*"):
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, MODEL)
    return sum(parameter.numel() for parameter in model.parameters())


def started(command, url, log):
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return process
        except OSError:
            time.sleep(0.5)
    raise SystemExit(
        f"{command[:2]} did not start; the end of its log is\n{pathlib.Path(log.name).read_text()[-3000:]}"
    )


def start(log):
    adapter = json.loads(render.l2_adapter(str(ROOT), 20, adapter=ADAPTER))
    if ADAPTER == "kvpersist":
        adapter["adapter_params"].update(live=["*"], gate_file="")
    lmcache = ["lmcache", "server", "--host", "127.0.0.1", "--http-host", "127.0.0.1", "--l1-size-gb", "2"]
    lmcache += ["--eviction-policy", "LRU", "--hash-algorithm", "blake3", "--l2-adapter", json.dumps(adapter)]
    vllm = ["vllm", "serve", str(MODEL), "--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", "24576"]
    vllm += ["--block-size", "128", "--num-gpu-blocks-override", "400", "--enforce-eager", "--no-enable-prefix-caching"]
    vllm += ["--port", "8000", "--kv-transfer-config", render.kv_transfer()]
    return [started(lmcache, f"{LMCACHE}/healthcheck", log), started(vllm, f"{VLLM}/health", log)]


def stop(processes):
    for process in reversed(processes):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for segment in pathlib.Path("/dev/shm").glob("lmcache_kv_*"):
        segment.unlink()


def ask(seed):
    messages = probe.conversation(seed, TOKENS)
    return probe.probe(LMCACHE, url=VLLM, model=NAME, messages=messages, max_tokens=1, timeout=300)


def main():
    parameters = make_model()
    log = OUT.with_suffix(".log").open("w")
    processes = start(log)
    ask(0)
    for seed in range(1, PAIRS + 1):
        assert ask(seed)["settled"]
        print(f"stored chat {seed} of {PAIRS}", flush=True)
    stop(processes)
    # What the page cache holds is no disk.
    subprocess.run(["python3", "-c", DROP, str(ROOT)], check=True)
    processes = start(log)
    ask(1000)
    mark, pairs, parts = log.tell(), [], []
    for seed in range(1, PAIRS + 1):
        order = ["hit", "recompute"] if seed % 2 else ["recompute", "hit"]
        seen = {kind: ask(seed if kind == "hit" else 1000 + seed) for kind in order}
        assert seen["hit"]["l2_tokens"] > 0.9 * seen["hit"]["prompt_tokens"], seen["hit"]
        assert seen["recompute"]["cached_tokens"] < 600, seen["recompute"]
        pairs.append({kind: seen[kind]["ttft_seconds"] for kind in seen} | {"tokens": seen["hit"]["prompt_tokens"]})
        print(pairs[-1], flush=True)
    stop(processes)
    log.close()
    text = pathlib.Path(log.name).read_text()[mark:]
    disk = [
        float(ms) / 1000
        for ms in re.findall(r"Prefetch request completed .*\(0 L1, [1-9][0-9]+ L2\) in ([0-9.]+) ms", text)
    ]
    copies = [
        float(s)
        for count, s in re.findall(r"Retrieved ([0-9]+) tokens in ([0-9.]+) seconds", text)
        if int(count) > 2000
    ]
    parts = {"disk_seconds": disk, "copy_seconds": copies}
    ratio = median(pair["recompute"] / pair["hit"] for pair in pairs)
    hit, recompute = (median(pair[kind] for pair in pairs) for kind in ("hit", "recompute"))
    verdict = "" if ADAPTER != "kvpersist" else ", target at least 15: " + ("ok" if ratio >= 15 else "MISSED")
    print(
        f"| {ADAPTER}: TTFT of {pairs[0]['tokens']} tokens after a restart of both | {recompute:.2f} s recompute, "
        f"{hit:.2f} s from disk | {ratio:.1f} x{verdict} | disk {median(disk):.2f} s, copy {median(copies):.2f} s |"
    )
    OUT.write_text(json.dumps({"adapter": ADAPTER, "parameters": parameters, "pairs": pairs, **parts}))


DROP = """
import os, sys
for entry in os.scandir(sys.argv[1]):
    if entry.is_file(follow_symlinks=False):
        file = os.open(entry.path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
"""

if __name__ == "__main__":
    main()
