#!/usr/bin/env bash
# Everything that needs a GPU but what gpu_memory.sh does: one H200, by its parts' times about half an hour (racecheck: 104 s for decode,
# 79 s for groups, beside other work). In an order in which one step's compiled code serves the next.
# usage: benchmarks/gpu.sh [RESULTS [SCRATCH]]     SCRATCH takes 30 GB; a tmpfs saves a minute
set -euo pipefail
results=${1:-benchmarks/results} scratch=${2:-/dev/shm/pagedweight}
sanitize() { # TOOL SECONDS: small calls of each kernel
  for kernel in decode groups prefill; do
    timeout "$2" compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 1 python tests/kernels_cuda/small_calls.py $kernel
  done
}

python -m pytest -q tests/kernels_cuda tests/quantize/test_quantize_gpu.py tests/serving/test_gpu.py
sanitize memcheck 300
sanitize synccheck 300
python -m pagedweight.bench.kernel --peers marlin_int4 bf16 --refcheck --json "$results"
python -m pagedweight.bench.groups --json "$results"
# Quantize and calibrate, from layers of full size to whole models.
python -m pagedweight.bench.offline qwen1.5-moe --layers 2 --folder "$scratch/source" -o "$results/offline.json"
python -m pagedweight.bench.offline mixtral --layers 1 --folder "$scratch/source-mixtral" -o "$results/offline.json"
sanitize racecheck 300
# Last, for it says at its end which part failed: Gemma 4 does where transformers is too new for vLLM.
LIMIT=3600 "$(dirname "$0")"/gpu_decode.sh "$results" "$scratch" qwen mixtral gemma
