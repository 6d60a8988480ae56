#!/usr/bin/env bash
# Elastic memory on a GPU of 141 GB. Parts may be named one by one, each of use alone and with a bound on its time; without
# names all run, in this order. A part that fails or runs out of time is said, and the next one begins.
# Seconds: seen on one H200 with 16 cores (about: expected from what was seen), and the bound.
#
#   prepare      random weights in the shape of Qwen1.5-MoE, whole and with four layers              25, 120 at most
#   movement     batches of rows, one engine each, and pages a step                           about 80, 120
#   pressure32   paged and bf16 within 32 GiB: 110 to start, 20 and 50 of load                       201, 260
#   pressure16   paged, 3 bits, Marlin int4, 4 bits within 16 GiB (6 leave KV too little):
#                75 to 88 to start, 33 each; ended at 192 s before 4 bits had their turn     about 225, 330
#   checks       the device; then side by side a rank, compute-sanitizer, the engine under
#                both runners: nothing is timed                                             13, then 146, 240
#   pressure24   paged, 3, 6 and 4 bits, Marlin int4 within 24 GiB: 77 to 88 to start, 37 each       289, 400
#   graphs       paged and 3 bits within 24 GiB with graphs for up to 1,024 tokens             about 160, 260
#   soak         300 s of steps, every byte compared in the end                                      400, 560
#
# The parts with figures want the machine to themselves.
# usage: benchmarks/gpu_memory.sh RESULTS SCRATCH [PART...]     SCRATCH takes 16 GB; a tmpfs saves a minute
set -uo pipefail
shopt -s nullglob
results=${1:-benchmarks/results} scratch=${2:-/dev/shm/pagedweight}
shift $(($# < 2 ? $# : 2))
model=$scratch/qwen1.5-moe/pagedweight small=$scratch/four-layers logs=$scratch/logs
mkdir -p "$results" "$scratch/soak" "$logs" "$(dirname "$model")"
: > "$logs/failed"
# Bits return when 256 blocks stay free for 64 steps, and never go below the bytes of 3 bits.
printf '{"format": "pagedweight-policy", "format_version": 1, "offload_blocks": 32, "reload_blocks": 256, "dwell_steps": 64,
  "allow_emergency": false}' > "$scratch/policy.json"

bounded() { # SECONDS NAME COMMAND...: what it says goes to a log of that name; its last lines are shown
  local seconds=$1 name=$2 begun=$SECONDS
  shift 2
  timeout --signal=TERM --kill-after=70 "$seconds" "$@" > "$logs/$name.log" 2>&1
  local code=$?
  tail -n 12 "$logs/$name.log" | cut -c -400
  echo "== $name: $((SECONDS - begun)) s, exit $code"
  [ $code -eq 0 ] || echo "$name" >> "$logs/failed"
}

prepare() {
  [ -e "$model/pagedweight.json" ] || bounded 90 prepare python3 -m pagedweight.bench.synthetic qwen1.5-moe "$model"
  [ -e "$small/pagedweight.json" ] || bounded 60 prepare-small python3 tests/serving/gpu_cases.py "$small"
}

movement() { # rows of earlier settings stay in the file
  local json=(--json "$results" --add)
  [ -e "$results/movement.json" ] || cp benchmarks/results/movement.json "$results"
  bounded 120 movement python3 -m pagedweight.bench.movement "${json[@]}" \
    --rows-per-batch 128 256 512 --pages-per-step 12 24 --gib 1 0.25 --repeats 8
}

flags=(--max-model-len 4096 --max-num-seqs 256 --max-num-batched-tokens 4096 --stream-interval 4)
sizes="1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256" as=
pressure() { # GIB BOUND PHASES POLICY...; sizes: tokens of captured graphs; as: to be added to names
  local gib=$1 bound=$2 phases=$3 kept=$scratch/pressure$1$as result=$results/pressure_gpu_$1$as
  shift 3
  rm -f "$kept"/*.load.jsonl
  # The reserve: graphs 0.5, activations 0.6, scratch 0.2, the driver's context 0.5 GiB, and some to spare.
  # shellcheck disable=SC2086
  bounded "$bound" "pressure$gib$as" python3 -m pagedweight.bench.pressure "$model" --gpu-memory "${gib}GiB" --gpu-reserve 2560MiB \
    --together $# --start-seconds 150 --policies "$@" --policy "$scratch/policy.json" --phases $phases \
    --prompt-tokens 192-512 --output-tokens 256-512 --keep "$kept" --output "$result.json" \
    -- "${flags[@]}" --compilation-config "{\"cudagraph_capture_sizes\": [$sizes]}"
  [ -e "$kept/paged-0.load.jsonl" ] || return
  bounded 20 "steps$gib$as" python3 -m pagedweight.bench.steps "$result.json" "$kept" --json "${result}_steps.json"
  bounded 30 "plot$gib$as" python3 -m pagedweight.cli.main plot \
    "$kept"/paged-0.load.jsonl "$kept"/static[36]-0.load.jsonl -o "$result.png"
}
burst="calm:3:5 burst:12:22 calm:9:5 long:4:8:1536-2048:192-320 calm:4:5"
pressure24() { pressure 24 400 "$burst" paged static3 static6 static4 marlin_int4; }
graphs() { local sizes="$sizes, 384, 512, 768, 1024" as=-graphs && pressure 24 260 "$burst" paged static3; }
pressure16() { pressure 16 330 "calm:2:2 burst:9:12 calm:6:2 long:3:2:1536-2048:192-320 calm:2:2" paged static3 marlin_int4 static4; }
pressure32() { pressure 32 260 "calm:2:5 burst:7:30 calm:6:5" paged bf16; }

checks() {
  # The first compares what the driver reports free: nothing else may start or end on the GPU meanwhile.
  bounded 60 device python3 -m pytest -q tests/memory_cuda/test_cuda_device.py tests/memory_cuda/test_cuda_signals.py
  bounded 120 rank python3 -m pytest -q --durations=5 tests/memory_cuda/test_cuda_rank.py &
  bounded 200 sanitizer compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
    python3 tests/memory_cuda/small_moves.py 40 &
  bounded 240 engine python3 -m pytest -q tests/serving/test_elastic_gpu.py
  wait
}

soak() { bounded 560 soak python3 tests/serving/soak_gpu.py "$small" "$scratch/soak" 300 "$results/soak_gpu.json"; }

pack() { # logs, and timelines of the loads alone
  for gib in 16 24 24-graphs 32; do
    [ ! -d "$scratch/pressure$gib" ] ||
      tar -czf "$results/pressure_gpu_$gib.tar.gz" -C "$scratch/pressure$gib" --exclude='*-[0-9].jsonl' .
  done
  tar -czf "$results/logs.tar.gz" -C "$logs" .
}
trap pack EXIT

[ $# -gt 0 ] || set -- prepare movement pressure32 pressure16 checks pressure24 graphs soak
for part in "$@"; do "$part"; done
[ ! -s "$logs/failed" ] || { echo "not all went well: $(paste -sd' ' "$logs/failed")" && exit 1; }
