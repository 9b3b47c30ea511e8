"""The store's codec on real KV: codec_bench.py PROMPTS ROUNDS

Runs inside the serving image, with SmolLM2-135M in /model. The KV is that of prompts of 1024 tokens of
English (Python's own documentation, which comes with it), in LMCache's layout [2, layers, tokens, hidden].
Random numbers or an untrained model would give another ratio.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pydoc_data.topics import topics

import torch
from kvpersist.objects import ChunkKey, Frame
from kvpersist_lmcache import codecs
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT_TOKENS, CHUNK_TOKENS = 1024, 256


def chunks(prompts):
    """KV of the prompts in bf16, one tensor for each chunk."""
    tokenizer = AutoTokenizer.from_pretrained("/model")
    model = AutoModelForCausalLM.from_pretrained("/model", dtype=torch.bfloat16)
    tokens = tokenizer("\n".join(text for _, text in sorted(topics.items())), return_tensors="pt").input_ids[0]
    found = []
    for number in range(prompts):
        prompt = tokens[None, number * PROMPT_TOKENS : (number + 1) * PROMPT_TOKENS]
        with torch.inference_mode():
            layers = model(prompt, use_cache=True, logits_to_keep=1).past_key_values.layers
        # [1, heads, tokens, head size] of each layer
        sides = [torch.stack([getattr(layer, side)[0] for layer in layers]) for side in ("keys", "values")]
        kv = torch.stack(sides).transpose(2, 3).flatten(3)
        found += [part.contiguous() for part in kv.split(CHUNK_TOKENS, dim=2)]
    return found


def as_bytes(tensor):
    return memoryview(tensor.view(torch.uint8).flatten().numpy())


def file_bytes(stored, raw):
    """Of a chunk's file; one that does not get smaller is stored as it is."""
    lengths = [Frame(ChunkKey("m", bytes(32), 0), "", "none", raw, length).file_bytes for length in (stored, raw)]
    return min(lengths)


def ratio(tensors):
    raw = [as_bytes(tensor) for tensor in tensors]
    packed = [codecs.encode("zstd", one) for one in raw]
    for one, stored in zip(raw, packed):
        back = bytearray(len(one))
        codecs.decode("zstd", stored, memoryview(back))
        assert back == one, "the codec lost something"
    sizes = [(len(one), len(stored)) for one, stored in zip(raw, packed)]
    return sum(file_bytes(one, one) for one, _ in sizes) / sum(file_bytes(stored, one) for one, stored in sizes)


def clocked(threads, function, *columns):
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(function, *(column[:threads] for column in columns)))  # its contexts are made once
        started = time.monotonic()
        list(pool.map(function, *columns))
        return time.monotonic() - started


def main():
    prompts, rounds = map(int, sys.argv[1:])
    kv = chunks(prompts)
    raw = [as_bytes(tensor) for tensor in kv]
    packed = [codecs.encode("zstd", one) for one in raw]
    into = [memoryview(bytearray(len(one))) for one in raw]
    work = {
        "encode": lambda threads: clocked(threads, lambda one: len(codecs.encode("zstd", one)), raw),
        "decode": lambda threads: clocked(threads, lambda one, to: codecs.decode("zstd", one, to), packed, into),
        # It is known to leave the GIL: what two threads can gain on this machine.
        "sha256": lambda threads: clocked(threads, lambda one: sha256(one).digest(), raw),
    }
    seen = {action: {"1": [], "2": []} for action in work}
    for number in range(rounds):
        for action, run in work.items():
            for threads in (1, 2) if number % 2 == 0 else (2, 1):
                seen[action][str(threads)].append(run(threads))
    ratios = {
        "bf16": ratio(kv),
        "fp16": ratio([tensor.to(torch.float16) for tensor in kv]),
        "fp8": ratio([tensor.to(torch.float8_e4m3fn) for tensor in kv]),
    }
    shown = {"chunks": len(kv), "raw_bytes": sum(map(len, raw)), "shape": list(kv[0].shape), "ratio": ratios, **seen}
    with open(3, "w") as answers:
        json.dump(shown, answers)


if __name__ == "__main__":
    main()
