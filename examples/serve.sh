#!/usr/bin/env bash
# Serve a model whose KV cache is larger than the GPU's memory:
#
#     examples/serve.sh MODEL [any SGLang flag ...]
#
# It is SGLang's own server. Only the lines with "inplacekv" differ from what you run today, and every flag you add
# after MODEL goes to SGLang and wins over the ones below. PYTHON chooses the interpreter.
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  sed -n '2,7s/^# \{0,1\}//p' "$0"
  exit 2
fi
model=$1
shift

flags=(
  --model-path "$model"

  # Selects the extension. Without it SGLang is stock, with the extension installed or not.
  --attention-backend inplacekv

  # Host memory for the part of the KV cache that does not fit the GPU, half computed on in place by the CPU, half
  # streamed to the GPU. It is taken and touched at start, so give what the server may keep.
  --inplacekv-host-memory "${HOST_MEMORY:-4GB}"

  # GPU memory for the rest: pages that stay on the GPU, and the buffers to stream through.
  # "auto" is what SGLang would have given its own KV cache.
  --inplacekv-gpu-memory "${GPU_MEMORY:-auto}"

  # Share of the host's tokens that the CPU attends, 0 to 1. "auto" starts from
  # measured rates, or from 0.5 without a GPU, and follows what CPU and transfers are measured to take.
  --inplacekv-cpu-share auto

  # A page is what is allocated, flushed and shared; --chunked-prefill-size has to be a multiple of it.
  --page-size 256
  --chunked-prefill-size 2048

  # Each running request holds one page of GPU memory open.
  --max-running-requests 8

  # sglang:inplacekv_* under /metrics: tokens per region, the CPU's share asked and reached.
  --enable-metrics

  --host 127.0.0.1
  --port "${PORT:-30000}"
)

# Without a GPU the whole server runs on the CPU. float32 is what every CPU computes well.
if ! command -v nvidia-smi > /dev/null || ! nvidia-smi -L > /dev/null 2>&1; then
  flags+=(--device cpu --dtype float32 --skip-server-warmup)
fi

exec "${PYTHON:-python}" -m sglang.launch_server "${flags[@]}" "$@"
