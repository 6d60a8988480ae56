#!/usr/bin/env bash
# Tokens a second through vLLM on one GPU of 141 GB, part by part, each bounded: rows go into RESULTS/decode_vllm.json as they are
# measured, what vLLM said into LOGS/PART.log (LOGS: SCRATCH/logs).
# usage: [LIMIT=SECONDS] [LOGS=FOLDER] [GEMMA_PATH=FOLDER] benchmarks/gpu_decode.sh RESULTS SCRATCH [PART...]
#   parts: float16 qwen mixtral gemma (the default) mixtral-whole;  SCRATCH takes 35 GB (75 with mixtral-whole)
#   seen on one H200: gemma 168 s, mixtral 151 s, their checkpoints 21 and 23 s before that
#   LIMIT: no part starts or goes on after so many seconds (default 1800)
#   GEMMA_PATH: a folder that comes first on PYTHONPATH for gemma. vLLM 0.26 reads Gemma 4's config with transformers before 5.15 only:
#   pip install --no-deps --target FOLDER transformers==5.14.1 tokenizers==0.22.2
set -uo pipefail
results=$1 scratch=$2 logs=${LOGS:-$2/logs} limit=${LIMIT:-1800} failed=0
shift 2
[ $# -gt 0 ] || set -- float16 qwen mixtral gemma
mkdir -p "$results" "$logs"

bounded() { # NAME SECONDS COMMAND...
  local name=$1 most=$2 begun=$SECONDS left=$((limit - SECONDS)) code
  shift 2
  if ((left < 30)); then
    echo "$name: not run, $left s are left"
    failed=1
    return
  fi
  timeout -k 20 $((most < left ? most : left)) "$@" > "$logs/$name.log" 2>&1
  code=$?
  ((code == 0)) || failed=1
  echo "$name: exit $code after $((SECONDS - begun)) s"
}
decode() { # NAME SECONDS MODEL FOLDER OPTION...
  local name=$1 most=$2 model=$3 folder=$4
  shift 4
  bounded "$name" "$most" python3 -m pagedweight.bench.decode --model "$model" --folder "$scratch/$folder" --json "$results" --add \
    --limit 240 "$@"
}
checkpoint() { # MODEL FOLDER OPTION...: made while the test runs, not while anything is timed
  [ -e "$scratch/$2/pagedweight/pagedweight.json" ] && return
  bounded "make-$2" 200 python3 -m pagedweight.bench.synthetic "$1" "$scratch/$2/pagedweight" --bits 3 4 5 6 "${@:3}"
}
gemma() { PYTHONPATH=${GEMMA_PATH:+$GEMMA_PATH:}${PYTHONPATH:-} "$@"; }

for part in "$@"; do
  [ "$part" != float16 ] || bounded float16 240 python3 -m pytest -q -s -k None-float16 tests/serving/test_gpu.py &
done
for part in "$@"; do
  case $part in
    qwen) checkpoint qwen1.5-moe qwen1.5-moe ;;
    mixtral) checkpoint mixtral mixtral --layers 8 ;;
    mixtral-whole) checkpoint mixtral mixtral-whole ;;
    gemma) gemma checkpoint gemma-4 gemma-4 --layers 6 ;;
  esac
done
wait
for part in "$@"; do
  case $part in
    # Three engines of Qwen1.5-MoE fit: each has 27 GB of KV cache for 64 sequences.
    qwen) decode qwen 420 qwen1.5-moe qwen1.5-moe --together 3 --engine 4 mix4 marlin_int4 bf16 mix5 5 ;;
    mixtral) decode mixtral 300 mixtral mixtral --layers 8 --together 4 --repeats 3 --engine 4 mix4 marlin_int4 bf16 ;;
    # bf16 alone has 93 GB of experts and 18 GB of KV cache.
    mixtral-whole) decode mixtral-whole 500 mixtral mixtral-whole --together 2 --engine 4 marlin_int4 bf16 ;;
    # Six layers: vLLM's random weights shrink what passes a layer of Gemma 4 by 2000 (layer_scalar), and from the twelfth on nothing
    # is left for routers to tell tokens apart by. CUTLASS DSL, which FlashAttention 4 needs and vLLM does not check for, may be absent.
    gemma) gemma decode gemma 300 gemma-4 gemma-4 --layers 6 --together 4 --repeats 3 --attention TRITON_ATTN --engine 4 mix4 marlin_int4 bf16 ;;
    float16)
      grep -E 'mean|passed|failed|skipped|error' "$logs/float16.log"
      grep -q '1 passed' "$logs/float16.log" || failed=1
      ;;
    *) echo "no part $part"; failed=1 ;;
  esac
done
exit $failed
