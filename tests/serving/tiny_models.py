"""Small models whose weights have equal names and shapes: tiny_models.py TOKENIZER_DIR OUT_DIR

`model` and `other` differ in their weights alone, `model` and `split` only in how the same
weights are read: 4 heads of 32, or 2 of 64. The wide initialisation makes the answer depend
on the prompt; otherwise equal answers would prove nothing. `fp8kv` says that its KV is fp8 in
hf_quant_config.json alone, `recurrent` has no attention and `sliding` has windows: none of them may
be cached as it looks.
"""

import json
import pathlib
import shutil
import sys

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

tokenizer, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])


SIZES = {
    "vocab_size": 49152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "initializer_range": 0.35,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama(heads, seed):
    torch.manual_seed(seed)
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 128 // heads}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads_of))


MODELS = {
    "model": lambda: llama(4, 1),
    "other": lambda: llama(4, 2),
    "split": lambda: llama(2, 1),
    "fp8kv": lambda: llama(4, 1),
    "sliding": lambda: MistralForCausalLM(
        MistralConfig(
            **SIZES,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            sliding_window=128,
        )
    ),
    "recurrent": lambda: MambaForCausalLM(
        MambaConfig(vocab_size=49152, hidden_size=64, num_hidden_layers=2, state_size=8)
    ),
}
for name, make in MODELS.items():
    make().to(torch.bfloat16).save_pretrained(out / name)
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, out / name)
    for file in (out / name).iterdir():
        file.chmod(0o644)
scheme = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
(out / "fp8kv/hf_quant_config.json").write_text(json.dumps(scheme))
