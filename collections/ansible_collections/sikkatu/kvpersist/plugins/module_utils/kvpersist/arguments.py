"""Arguments and environment of vLLM that are known to leave the cached KV as it is.

Everything else may change what a cached chunk means without changing its key, so it is a
doubt (:func:`doubtful_arguments`), and with a doubt nothing is cached. An allow-list: an
option that a later vLLM adds is refused until somebody looked at it.
"""

from __future__ import annotations

import re
from typing import FrozenSet, Iterable, List, Mapping, Optional

#: Options of ``vllm serve`` 0.32 about scheduling, memory, logging, the HTTP API, sampling
#: and parsing of answers. ``--trust-remote-code``: the code is part of the weights' fingerprint.
HARMLESS_OPTIONS: FrozenSet[str] = frozenset(
    """
    --aggregate-engine-logging --allow-credentials --allowed-headers --allowed-local-media-path
    --allowed-media-domains --allowed-methods --allowed-origins --api-server-count --async-scheduling
    --chat-template-content-format --collect-detailed-traces -O --optimization-level
    --cudagraph-capture-sizes --cudagraph-metrics --custom-histogram-buckets --default-chat-template-kwargs
    --disable-access-log-for-endpoints --disable-custom-all-reduce --disable-fastapi-docs
    --disable-frontend-multiprocessing --disable-log-requests --disable-log-stats --disable-uvicorn-access-log
    --distributed-executor-backend --distributed-timeout-seconds --enable-auto-tool-choice
    --enable-chunked-prefill --enable-expert-parallel --enable-force-include-usage --enable-log-deltas
    --enable-log-outputs --enable-log-requests --enable-logging-iteration-details --enable-mfu-metrics
    --enable-offline-docs --enable-per-request-metrics --enable-prefix-caching --enable-prompt-tokens-details
    --enable-request-id-headers --enable-server-load-tracking --enable-ssl-refresh
    --enable-tokenizer-info-endpoint --enforce-eager --exclude-tools-when-tool-choice-none
    --fail-on-environ-validation --generation-config --gpu-memory-utilization --h11-max-header-count
    --h11-max-incomplete-event-size --kv-cache-memory-bytes --kv-cache-metrics --kv-cache-metrics-sample
    --limit-mm-per-prompt --log-config-file --log-error-stack --log-level --logprobs-mode
    --long-prefill-token-threshold --max-cudagraph-capture-size --max-log-len --max-logprobs
    --max-num-active-seqs --max-num-batched-tokens --max-num-queued-reqs --max-num-queued-tokens
    --max-num-scheduled-tokens --max-num-seqs --max-parallel-loading-workers
    --num-gpu-blocks-override --numa-bind --numa-bind-cpus --numa-bind-nodes --otlp-traces-endpoint
    --override-generation-config --prefill-schedule-interval --prefix-caching-hash-algo
    --reasoning-config --reasoning-parser --response-role --return-tokens-as-token-ids --root-path
    --safetensors-load-strategy --safetensors-prefetch-block-size --safetensors-prefetch-num-threads
    --scheduler-reserve-full-isl --scheduling-policy --seed --show-hidden-metrics-for-version
    --shutdown-timeout --skip-mm-profiling --sse-keep-alive-interval --ssl-ca-certs --ssl-cert-reqs
    --ssl-certfile --ssl-ciphers --ssl-keyfile --stream-interval --structured-outputs-config
    --tool-call-parser --tool-server --tool-strict-level --trust-remote-code --trust-request-chat-template
    --use-tqdm-on-load --uvicorn-log-level --watermark
    """.split()
)

#: Options that carry a pin, and the field that carries it: set that instead.
PINNED_OPTIONS: Mapping[str, str] = {
    "--dtype": "dtype",
    "--quantization": "quantization",
    "-q": "quantization",
    "--hf-overrides": "hf_overrides",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--block-size": "block_size",
    "--tensor-parallel-size": "tensor_parallel_size",
    "-tp": "tensor_parallel_size",
    "--pipeline-parallel-size": "pipeline_parallel_size",
    "-pp": "pipeline_parallel_size",
    "--decode-context-parallel-size": "decode_context_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "--max-model-len": "max_model_len",
    "--revision": "model_revision",
    "--tokenizer": "tokenizer_id",
    "--tokenizer-revision": "tokenizer_revision",
    "--kv-transfer-config": "connector",
}

#: Options of ``lmcache server`` 0.5.6 about threads, time-outs, memory and reports. Each of the others
#: changes what an object is or who can reach the server, or has a variable of its own.
HARMLESS_SERVER_OPTIONS: FrozenSet[str] = frozenset(
    """
    --grpc-server-workers --kv-event-log-size --l1-align-bytes --l1-init-size-gb --l1-read-ttl-seconds
    --l1-use-hugepages --l1-use-lazy --l1-write-ttl-seconds --eviction-ratio --eviction-trigger-watermark
    --l2-prefetch-max-in-flight --l2-prefetch-policy --max-cpu-workers --max-gpu-workers --max-workers
    --otlp-endpoint --session-ttl-seconds --worker-reap-timeout-seconds --worker-registration-grace-seconds
    """.split()
)

#: Variables that start with one of these are vLLM's or LMCache's own ...
_OWN_VARIABLES = ("VLLM_", "LMCACHE_")
#: ... these put other code in front of the image's, or change how it computes ...
_OTHER_CODE = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "NVIDIA_TF32_OVERRIDE")
#: ... and of those, these are about logging, memory, processes, time-outs and caches of code.
HARMLESS_VARIABLES: FrozenSet[str] = frozenset(
    """
    LMCACHE_LOG_LEVEL LMCACHE_TRACK_USAGE VLLM_CACHE_ROOT VLLM_CONFIGURE_LOGGING VLLM_CONFIG_ROOT
    VLLM_CPU_KVCACHE_SPACE VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_DISABLE_COMPILE_CACHE
    VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_READY_TIMEOUT_S
    VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HOST_IP VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH
    VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM
    VLLM_LOG_STATS_INTERVAL VLLM_NCCL_SO_PATH VLLM_NO_USAGE_STATS VLLM_PORT VLLM_SKIP_P2P_CHECK
    VLLM_WORKER_MULTIPROC_METHOD VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
    """.split()
)


def option(word: object) -> Optional[str]:
    """The option that a word of a command line names, in vLLM's spelling; None for a value.

    vLLM takes ``--a_b`` for ``--a-b``, ``--no-a`` for the opposite of ``--a``, and ``--a.b=c``
    for a key inside ``--a`` (``FlexibleArgumentParser``).
    """
    text = str(word)
    if not re.match(r"-(?![0-9.])", text) or len(text) < 2:
        return None
    name = re.split(r"[=.]", text, maxsplit=1)[0].replace("_", "-")
    # Only the bare level is harmless: vLLM takes "-O=--a.b=c" apart again.
    if name.startswith("-O"):
        return "-O" if re.fullmatch(r"-O=?[0-3]?", text) else text
    return "--" + name[5:] if name.startswith("--no-") else name


def doubtful_arguments(arguments: Iterable[object]) -> List[str]:
    """What among further arguments of ``vllm serve`` may change the cached KV."""
    found = []
    for word in arguments:
        name = option(word)
        if name is None or name in HARMLESS_OPTIONS:
            continue
        if name in PINNED_OPTIONS:
            found.append(f"{name} among the extra arguments; allowed: the pin {PINNED_OPTIONS[name]}")
        else:
            found.append(f"{name} among the extra arguments; allowed: options that are known to leave the KV as it is")
    return found


def doubtful_variables(names: Iterable[object]) -> List[str]:
    """What among the container's environment variables may change the cached KV."""
    return [
        f"{name} in the environment; allowed of vLLM's and LMCache's own: {', '.join(sorted(HARMLESS_VARIABLES))}"
        for name in map(str, names)
        if name in _OTHER_CODE or (name.startswith(_OWN_VARIABLES) and name not in HARMLESS_VARIABLES)
    ]


def docker_variables(arguments: Iterable[object]) -> List[str]:
    """Names of the variables that arguments of ``docker run`` set: ``--env A=1``, ``-e A``, ``-eA=1``, ``-ie A``."""
    names = []
    words = [str(word) for word in arguments]
    for word, following in zip(words, [*words[1:], ""]):
        match = re.fullmatch(r"--env(?:=(.*))?|-[a-zA-Z]*?e(?:=?(.*))?", word, re.S)
        if match:
            given = match.group(1) or match.group(2) or following
            names.append(given.partition("=")[0])
    return names


def doubtful_server_arguments(arguments: Iterable[object]) -> List[str]:
    """What among further arguments of ``lmcache server`` is not known to leave objects as they are.

    argparse takes the beginning of an option for the option, which an allow-list is not deceived by.
    """
    names = (str(word).partition("=")[0] for word in arguments if str(word).startswith("-"))
    return [name for name in names if name not in HARMLESS_SERVER_OPTIONS]
