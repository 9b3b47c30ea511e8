#!/usr/bin/env bash
# Speed and memory of the store against its targets. Prints a table, writes reports/bench.json,
# and never fails for a figure. Usage: [VARIABLE=VALUE...] bench.sh
#   BENCH_QUICK=1    few objects and two rounds: shows that it works, the figures mean nothing
#   BENCH_MILLION=1  also indexes a million files (minutes)
#   BENCH_DIR=DIR    on the disk of this directory; otherwise on that of docker's volumes
source "$(dirname "$0")/../env/common.sh"
cd "$REPO"
VOLUME=kvpersist-bench

tests/env/system.sh packages
daemon_was_up=false
docker info >/dev/null 2>&1 && daemon_was_up=true
tests/env/prepare.sh
docker image inspect "$SERVING_IMAGE" >/dev/null 2>&1 || docker import "$SERVING_TAR" "$SERVING_IMAGE" >/dev/null
if ! command -v fio >/dev/null; then
  say "installing fio"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends fio >"$CACHE/apt.log" 2>&1 ||
    { tail -20 "$CACHE/apt.log" >&2; die "apt-get install fio failed"; }
fi

clean_up() {
  docker ps -aq --filter "name=^kvpersist-bench-" | xargs -r docker rm -f >/dev/null
  say "removing the files of the benchmark"
  rm -rf "$BENCH_ROOT"
  docker volume rm "$VOLUME" >/dev/null 2>&1 || true
  $daemon_was_up || tests/env/system.sh down
}
if [ -n "${BENCH_DIR:-}" ]; then
  BENCH_ROOT=$(realpath "$BENCH_DIR")/$VOLUME
  mkdir "$BENCH_ROOT" || die "is another benchmark running? If not, remove $BENCH_ROOT"
else
  ! docker volume inspect "$VOLUME" >/dev/null 2>&1 ||
    die "is another benchmark running? If not: docker volume rm $VOLUME"
  docker volume create --label kvpersist "$VOLUME" >/dev/null
  BENCH_ROOT=$(docker volume inspect -f '{{.Mountpoint}}' "$VOLUME")
fi
trap clean_up EXIT
case $(stat -f -c %T "$BENCH_ROOT") in
  tmpfs | overlayfs) die "$BENCH_ROOT is on no disk of its own: set BENCH_DIR to a directory of the disk to measure" ;;
esac

export BENCH_ROOT SERVING_IMAGE MODEL_DIR
mkdir -p reports
/usr/bin/python3 tests/bench/bench.py reports/bench.json

CORE=$REPO/collections/ansible_collections/sikkatu/kvpersist
for adapter in kvpersist nixl_store_dynamic; do
  say "time to the first token after a restart of both servers: $adapter"
  mkdir "$BENCH_ROOT/ttft"
  docker run --rm --network none --shm-size 6g --name kvpersist-bench-ttft -v "$MODEL_DIR:/tokenizer:ro" \
    -v "$BENCH_ROOT/ttft:/root-dir" -v "$REPO/reports:/reports" -v "$REPO/tests/bench/ttft_bench.py:/ttft_bench.py:ro" \
    -v "$CORE/plugins/module_utils/kvpersist:/lib/kvp/kvpersist:ro" \
    -v "$CORE/roles/kvp_lmcache/files/kvpersist_lmcache:/lib/kvp/kvpersist_lmcache:ro" \
    -e HOME=/tmp -e PYTHONPATH=/lib/kvp -e PYTHONDONTWRITEBYTECODE=1 -e LMCACHE_TRACK_USAGE=false -e VLLM_NO_USAGE_STATS=1 \
    -e VLLM_CPU_KVCACHE_SPACE=1 -e VLLM_ENABLE_V1_MULTIPROCESSING=0 -e PATH=/opt/venv/bin:/usr/bin:/bin \
    -e BENCH_PAIRS="$([ "${BENCH_QUICK:-}" = 1 ] && echo 1 || echo 5)" \
    "$SERVING_IMAGE" python /ttft_bench.py /tokenizer /root-dir "/reports/bench-ttft-$adapter.json" "$adapter" ||
    say "not measured: $adapter; reports/bench-ttft-$adapter.log says why"
  rm -rf "$BENCH_ROOT/ttft"
done
say "done in $SECONDS s; all samples are in reports/bench.json"
