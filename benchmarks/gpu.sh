#!/usr/bin/env bash
# Everything that needs a GPU (one H200: about ten minutes), in an order in which one step's compiled code serves the next.
# usage: benchmarks/gpu.sh [RESULTS [SCRATCH]]     SCRATCH takes 15 GB; a tmpfs saves half a minute
set -euo pipefail
results=${1:-benchmarks/results} scratch=${2:-/dev/shm/pagedweight}

python -m pytest -q tests/kernels_cuda tests/serving/test_gpu.py
python -m pagedweight.bench.kernel --peers marlin_int4 bf16 --refcheck --json "$results"
# Three engines at a time fit 141 GB: each has 27 GB of KV cache for 64 sequences.
python -m pagedweight.bench.decode --together 3 --engine 4 mix4 marlin_int4 bf16 5 mix5 3 6 \
  --folder "$scratch" --json "$results"
