# Settings and helpers of the test environment; sourced by every script here.
# shellcheck shell=bash disable=SC2034  # the scripts that source it use them
set -euo pipefail

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# What is slow to make is kept outside the checkout and made again when missing.
CACHE=${KVP_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}}/kvpersist
mkdir -p "$CACHE"

# Where pip looks for torch's CPU build when the configured indexes lack it.
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

ANSIBLE_CORE_BASE=2.19.14 # runs on Debian 12's Python 3.11
ANSIBLE_CORE_NEXT=2.21.5  # needs Python 3.12 or newer

UV=$CACHE/bootstrap/bin/uv
COLLECTIONS=$CACHE/collections-$(sha256sum <"$REPO/requirements.yml" | cut -c1-12)
MODEL_DIR=$CACHE/models/SmolLM2-135M-Instruct

export DOCKER_HOST=${DOCKER_HOST:-unix:///var/run/docker.sock}

# One clock for all scripts of a run.
export KVP_STARTED=${KVP_STARTED:-$(date +%s)}
say() { printf '\033[1m[%4ds] %s\033[0m\n' "$(($(date +%s) - KVP_STARTED))" "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# digest FILE... - short digest of the files that an artefact is made from
digest() { cat "$@" | sha256sum | cut -c1-12; }

HOST_IMAGE=kvpersist-host:$(digest "$REPO"/tests/hosts/Dockerfile "$REPO"/tests/hosts/packages.txt)
SERVING_BASE=kvpersist-serving-base:$(digest "$REPO"/tests/serving/Dockerfile)
SERVING_ID=$(digest "$REPO"/requirements/serving-cpu.txt "$REPO"/tests/serving/Dockerfile "$REPO"/tests/serving/build.sh)
SERVING_TAR=$CACHE/serving-cpu-$SERVING_ID.tar
SERVING_IMAGE=kvpersist/vllm-cpu:$SERVING_ID
WHEELS=$CACHE/wheels-$(digest "$REPO"/requirements/serving-cpu.txt)

# use_controller base|next - put that controller environment in front
use_controller() {
  local venv
  venv=$("$REPO/tests/env/controller.sh" "$1")
  export PATH=$venv/bin:$PATH ANSIBLE_CONFIG=$REPO/ansible.cfg
  export ANSIBLE_COLLECTIONS_PATH=$REPO/collections:$COLLECTIONS
}
