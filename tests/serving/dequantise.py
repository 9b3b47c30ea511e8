"""Write a GGUF model as bf16 safetensors with its tokenizer: dequantise.py FILE.gguf OUT_DIR."""

import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

gguf, out = pathlib.Path(sys.argv[1]), sys.argv[2]
where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
tokenizer = AutoTokenizer.from_pretrained(**where)
model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
# The loaded weights are plain bf16 tensors; only the label says GGUF, and it forbids saving.
model.hf_quantizer = None
del model.config.quantization_config
model.save_pretrained(out)
tokenizer.save_pretrained(out)
