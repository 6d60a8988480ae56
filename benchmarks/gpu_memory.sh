#!/usr/bin/env bash
# Elastic memory on a GPU of 141 GB (one H200: about fifteen minutes): tests, movement, pressure, soak.
# usage: benchmarks/gpu_memory.sh [RESULTS [SCRATCH]]     SCRATCH takes 20 GB; a tmpfs saves a minute
set -euo pipefail
results=${1:-benchmarks/results} scratch=${2:-/dev/shm/pagedweight}
model=$scratch/qwen1.5-moe/pagedweight small=$scratch/four-layers
mkdir -p "$scratch/soak"
printf '{"format": "pagedweight-policy", "format_version": 1, "offload_blocks": 32, "reload_blocks": 256, "dwell_steps": 64}' \
  > "$scratch/policy.json"

python -m pytest -q tests/memory_cuda tests/serving/test_elastic_gpu.py
compute-sanitizer --tool memcheck --error-exitcode 9 python -m pytest -q -x tests/memory_cuda/test_cuda_rank.py
python -m pagedweight.bench.movement --page-mib 16 --pages-per-step 24 --json "$results"

[ -e "$model/pagedweight.json" ] || python -m pagedweight.bench.synthetic qwen1.5-moe "$model"
flags=(--max-model-len 4096 --max-num-seqs 256 --max-num-batched-tokens 4096 --stream-interval 4
  --compilation-config '{"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]}')
pressure() { # GIB TOGETHER POLICY...
  local gib=$1 together=$2
  shift 2
  # The reserve: graphs 0.5, activations 0.6, scratch 0.2, the driver's context 0.5 GiB, and some to spare.
  python -m pagedweight.bench.pressure "$model" --gpu-memory "${gib}GiB" --gpu-reserve 2560MiB --together "$together" --policies "$@" \
    --policy "$scratch/policy.json" --phases calm:20:6 burst:8:70 calm:30:6 long:10:8:1536-2048:64-128 calm:10:6 \
    --prompt-tokens 128-512 --output-tokens 128-384 --keep "$scratch/pressure$gib" --output "$results/pressure_gpu_$gib.json" -- "${flags[@]}"
  python -m pagedweight.cli.main plot "$scratch/pressure$gib"/paged-0.jsonl "$scratch/pressure$gib"/static*-0.jsonl \
    -o "$results/pressure_gpu_$gib.png"
}
pressure 24 5 paged static6 static4 static3 marlin_int4
pressure 16 5 paged static6 static4 static3 marlin_int4
pressure 32 2 paged bf16

[ -d "$small" ] || python tests/serving/gpu_cases.py "$small"
python tests/serving/soak_gpu.py "$small" "$scratch/soak" 300 "$results/soak_gpu.json"
