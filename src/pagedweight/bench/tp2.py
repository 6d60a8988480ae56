"""Is a model served by two GPUs faster than by one, and does it say the same?

Tensor parallelism 1 and 2 side by side on a checkpoint of random weights and a model's real shape,
both at the same bits with everything else alike: tokens a second as `bench decode` times them,
then the log-probabilities of the same texts from both. A third engine has two ranks and
`--memory`: a burst of requests takes bits on both ranks alike and gives them back. With `--tokens
CHECKPOINT`, a trained model, both are asked for greedy answers too.

    pagedweight bench tp2 [--model mixtral] [--layers 8] [--bits 4] [--json DIR]

NVLink multicast stays off (VLLM_ALLREDUCE_USE_SYMM_MEM=0, no fused all-reduce): vLLM's own
all-reduce over peer memory, or NCCL's, joins the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedweight.bench.arguments import positive, positive_float
from pagedweight.bench.decode import PLAN, Engine, gpu_name, import_once, kv_cache_bytes
from pagedweight.bench.decode_engine import Job
from pagedweight.bench.models import MODELS, model_config
from pagedweight.bench.record import machine, write_record
from pagedweight.bench.tp2_engine import serve
from pagedweight.checkpoint.plan import save_plan, uniform_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.size_table import SizeTable
from pagedweight.errors import UserError
from pagedweight.serving.launch import elastic_classes
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.versions import vllm_version

RESULT = "tp2.json"
BATCHES = (1, 16, 64)
SEQUENCE, NEW_TOKENS, TEXT_SEQUENCE = 1024, 128, 192
KV_AT_START = 0.1
"""KV of the burst that the elastic engine has room for with all bits."""
BURST_TOKENS = 768


def engines(folder: Path, options: argparse.Namespace) -> dict[str, Job]:
    """What each engine's process is given, by name."""
    ours = options.checkpoint or folder / "pagedweight"
    jobs = {f"tp{n}": _job(folder, f"tp{n}", ours, n, options) for n in (1, 2)}
    if not options.no_elastic:
        jobs["elastic"] = _job(folder, "elastic", ours, 2, options)
    if options.tokens:
        jobs |= {f"text{n}": _job(folder, f"text{n}", options.tokens, n, options) for n in (1, 2)}
    return jobs


def _job(folder: Path, name: str, path: Path, ranks: int, options: argparse.Namespace) -> Job:
    checkpoint = Checkpoint.open(path)
    (folder / "engines" / name).mkdir(parents=True, exist_ok=True)
    save_plan(folder / "engines" / name / PLAN, uniform_plan(checkpoint, options.bits))
    config = json.loads((path / "config.json").read_text())
    most, text = max(options.batch), name.startswith("text")
    sequence, new = (TEXT_SEQUENCE, TEXT_SEQUENCE // 4) if text else options.lengths
    asked: dict[str, Any] = {
        "model": str(path.resolve()),
        "tensor_parallel_size": ranks,
        "dtype": "float32" if options.cpu else config["dtype"],
        "max_model_len": sequence + 64,
        "max_num_seqs": most,
        "kv_cache_memory_bytes": _kv_bytes(config, most, sequence, options, ranks),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        **(_ON_CPU if options.cpu else _on_gpu(options)),
    }
    if not text:
        asked["skip_tokenizer_init"] = True
    if name == "elastic":
        memory = elastic_memory(checkpoint, config, options, ranks)
        scheduler, worker = elastic_classes()
        asked |= {"scheduler_cls": scheduler, "worker_cls": worker}
        asked["kv_cache_memory_bytes"] = memory
        asked["additional_config"] = ServeOptions(memory=memory).additional_config()
    else:
        asked["additional_config"] = ServeOptions(plan=PLAN).additional_config()
    return Job(
        directory=folder / "engines" / name,
        arguments=asked,
        vocabulary=config["vocab_size"],
        batches=options.batch,
        prompt_tokens=sequence - new,
        new_tokens=new,
        repeats=options.repeats,
    )


_ON_CPU = {"enforce_eager": True, "block_size": 32}


def _on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.05,  # only checked at start: the size of the cache is given
        "compilation_config": {
            "cudagraph_capture_sizes": sorted(set(options.batch)),
            "pass_config": {"fuse_allreduce_rms": False},  # uses NVLink multicast where it can
        },
    }


def elastic_memory(
    checkpoint: Checkpoint, config: dict[str, Any], options: argparse.Namespace, ranks: int
) -> int:
    """Bytes for each rank: experts at the top level, and a part of the burst's KV."""
    sizes = SizeTable.of(checkpoint.shape.part(ranks - 1, ranks), checkpoint.bits)
    blocks = len(checkpoint.moe_layers) * checkpoint.shape.experts
    weights = blocks * int(sizes.resident[:, -1].sum())
    burst = _kv_bytes(config, options.burst, BURST_TOKENS, options, ranks)
    return int(1.03 * weights + KV_AT_START * burst) + (options.spare << 20)


def _kv_bytes(
    config: dict[str, Any], requests: int, tokens: int, options: argparse.Namespace, ranks: int
) -> int:
    """Of a rank; the CPU serves in float32."""
    return kv_cache_bytes(config, requests, tokens, ranks, 4 if options.cpu else 2)


def compare(first: list[Any], second: list[Any]) -> dict[str, Any]:
    """Log-probabilities [texts][positions] of the same tokens, and the tokens found most likely."""
    off = np.abs(np.concatenate([np.subtract(*pair) for pair in _pairs(first, second, "logprobs")]))
    same = [np.equal(*pair) for pair in _pairs(first, second, "best")]
    answers = [a["answer"] == b["answer"] for a, b in zip(first, second, strict=True)]
    return {
        "positions": int(off.size),
        "logprob_mean_difference": float(off.mean()),
        "logprob_p99_difference": float(np.quantile(off, 0.99)),
        "logprob_most_difference": float(off.max()),
        "most_likely_token_agrees": float(np.concatenate(same).mean()),
        "answers": len(answers),
        "answers_equal": sum(answers),
    }


def _pairs(first: list[Any], second: list[Any], what: str) -> list[tuple[Any, Any]]:
    return [(a[what], b[what]) for a, b in zip(first, second, strict=True)]


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, written after each engine. On GPUs engines start side by side, and each is timed
    while the others stand still; on the CPU one comes after the other."""
    begun = time.perf_counter()
    if not options.cpu:
        import_once()
    prepare(folder, options)
    record: dict[str, Any] = {"machine": about_machine(options), "model": _about(folder, options)}
    jobs, said = engines(folder, options), {}
    for names in [[name] for name in jobs] if options.cpu else [list(jobs)]:
        running = {name: Engine(jobs[name], serve) for name in names}
        try:
            for name, engine in running.items():
                record[name] = _start(engine, options.limit)
            for name, engine in running.items():
                if "failed" not in record[name]:
                    said[name] = _ask(engine, options.limit, record[name])
                    _compare(record, said)
                _write(record, options, begun)
        finally:
            for engine in running.values():
                engine.end()
    return record


def _ask(engine: Engine, limit: float, into: dict[str, Any]) -> dict[str, Any]:
    """What an engine said, apart from what goes into its record."""
    try:
        engine.go()
        found = engine.answer(limit)
    except (RuntimeError, OSError) as error:
        into["failed"] = str(error)
        return {}
    said = {name: found.pop(name) for name in ("said", "again") if name in found}
    into |= found
    return said


def _compare(record: dict[str, Any], said: dict[str, dict[str, Any]]) -> None:
    """One rank beside two, and one beside itself, asked a text at a time instead of all at once."""
    pairs = {
        "tp1_and_tp2": ("tp1", "said", "tp2", "said"),
        "text_tp1_and_tp2": ("text1", "said", "text2", "said"),
        "tp1_in_other_batches": ("tp1", "said", "tp1", "again"),
    }
    for name, (one, first, two, second) in pairs.items():
        both = said.get(one, {}).get(first), said.get(two, {}).get(second)
        if both[0] and both[1]:
            record[name] = compare(*both)


def _start(engine: Engine, limit: float) -> dict[str, Any]:
    try:
        return {"start_s": round(engine.answer(limit)[1], 1)}
    except RuntimeError as error:
        return {"failed": str(error)}


def _write(record: dict[str, Any], options: argparse.Namespace, begun: float) -> None:
    record["seconds"] = round(time.perf_counter() - begun, 1)
    record["speedup"] = speedup(record)
    print(json.dumps({name: record[name] for name in list(record)[2:]}), flush=True)
    if options.json:
        write_record(options.json / RESULT, record)


def speedup(record: dict[str, Any]) -> dict[str, float]:
    """Tokens a second of two ranks for one of one rank, by batch."""
    rates = [
        {row["batch"]: row["tokens_s"] for row in record.get(name, {}).get("rows", [])}
        for name in ("tp1", "tp2")
    ]
    both = rates[0].keys() & rates[1].keys()
    return {str(n): round(rates[1][n] / rates[0][n], 3) for n in sorted(both)}


def prepare(folder: Path, options: argparse.Namespace) -> None:
    """The checkpoint of random weights, unless one is given or there."""
    ours = folder / "pagedweight"
    if options.checkpoint or (ours / "pagedweight.json").exists():
        return
    command = [sys.executable, "-m", "pagedweight.bench.synthetic", options.model, str(ours)]
    layers = ["--layers", str(options.layers)] if options.layers else []
    # In a process of its own: this one must not hold a GPU context while engines are timed.
    subprocess.run([*command, *layers], check=True)


def _about(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    checkpoint = Checkpoint.open(options.checkpoint or folder / "pagedweight")
    whole = model_config(options.model)["num_hidden_layers"]
    return {
        "name": checkpoint.path.name if options.checkpoint else options.model,
        "layers": checkpoint.manifest.num_hidden_layers,
        "layers_published": None if options.checkpoint else whole,
        "bits": options.bits,
        "sequence": options.sequence,
        "new_tokens": options.new_tokens,
    }


def about_machine(options: argparse.Namespace) -> dict[str, Any]:
    """Where and with what it was measured."""
    gpu = None if options.cpu else gpu_name()
    return {"gpu": gpu, "gpus": 0 if options.cpu else 2, **machine(), "vllm": vllm_version()}


def main(argv: Sequence[str] | None = None) -> None:
    """Start the engines, measure, compare, print, and with --json write tp2.json."""
    parser = argparse.ArgumentParser(prog="pagedweight bench tp2", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="mixtral", help="whose shape")
    parser.add_argument("--layers", type=positive, help="only so many of the model's layers")
    parser.add_argument("--bits", type=positive, default=4, help="level of the fixed engines")
    parser.add_argument(
        "--batch", nargs="+", type=positive, default=list(BATCHES), help="sequences at a time"
    )
    parser.add_argument("--sequence", type=positive, default=SEQUENCE, help="tokens at the end")
    parser.add_argument("--new-tokens", type=positive, default=NEW_TOKENS, help="tokens sampled")
    parser.add_argument("--repeats", type=positive, default=2, help="of each measurement")
    parser.add_argument("--burst", type=positive, default=64, help="requests of the burst")
    parser.add_argument("--spare", type=positive, default=160, help="MiB for reserve and pages")
    parser.add_argument("--no-elastic", action="store_true", help="fixed bits only")
    parser.add_argument("--tokens", type=Path, help="a trained checkpoint to ask for answers")
    parser.add_argument("--checkpoint", type=Path, help="instead of random weights")
    parser.add_argument("--cpu", action="store_true", help="two ranks on the CPU, to try it out")
    parser.add_argument("--limit", type=positive_float, default=600, help="seconds for an engine")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made, kept there")
    parser.add_argument("--json", type=Path, help="folder for tp2.json")
    options = parser.parse_args(argv)
    options.lengths = (options.sequence, options.new_tokens)
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
    if options.cpu:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    elif _gpus() < 2:
        raise UserError(f"bench tp2 needs two GPUs; there are {_gpus()}")
    if options.folder:
        measure(options.folder, options)
        return
    with tempfile.TemporaryDirectory(prefix="pagedweight-tp2-") as folder:
        measure(Path(folder), options)


def _gpus() -> int:
    """GPUs that nvidia-smi lists; asks without making a context."""
    try:
        asked = ["nvidia-smi", "--list-gpus"]
        return len(subprocess.run(asked, capture_output=True, text=True).stdout.splitlines())
    except OSError:
        return 0


if __name__ == "__main__":
    main()
