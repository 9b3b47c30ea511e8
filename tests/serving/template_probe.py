"""Digests of a model's chat template and of changed ones, on two days: template_probe.py MODEL_DIR"""

import importlib.machinery
import importlib.util
import json
import os
import sys
import time

loader = importlib.machinery.SourceFileLoader("resolver", "/usr/lib/kvpersist/resolve-identity")
resolver = importlib.util.module_from_spec(importlib.util.spec_from_loader("resolver", loader))
loader.exec_module(resolver)

from vllm.engine.arg_utils import EngineArgs  # noqa: E402  (the resolver sets the environment first)
from vllm.tokenizers.registry import cached_tokenizer_from_config  # noqa: E402  (as above)

model_config = EngineArgs(model=sys.argv[1], dtype="bfloat16", max_model_len=1024).create_model_config()
tokenizer = cached_tokenizer_from_config(model_config)
original = tokenizer.chat_template
TEMPLATES = {
    "": original,
    "dated ": "{{ strftime_now('%d %b %Y') }}" + original,
    "one letter": original + "x",
    "thinking": original + "{% if enable_thinking is defined and enable_thinking %}t{% endif %}",
    "tools": original + "{% if tools %}t{% endif %}",
}
# 26 hours apart: never the same date.
ZONES = {"today": "A12", "tomorrow": "B-14"}

seen = {}
for name, template in TEMPLATES.items():
    tokenizer.chat_template = template
    for day, zone in ZONES.items():
        os.environ["TZ"] = zone
        time.tzset()
        seen[name + day if name in ("", "dated ") else name] = resolver.chat_template(model_config, [])
resolver.RESULT.write(json.dumps(seen) + "\n")
resolver.RESULT.flush()
os._exit(0)
