"""How many tokens a second does vLLM decode: pagedweight, mixed or uniform, beside int4 and bf16?

End to end on one GPU with random weights of a model's real shape. Every engine runs in a process of
its own with the same settings: CUDA graphs, no prefix caching, `--new-tokens` sampled after a
prompt of random tokens that brings the sequence to `--sequence`. Everything but the routed experts
is bfloat16 and the same random numbers in all of them.

    pagedweight bench decode [--model qwen1.5-moe] [--engine bf16 4 mix4] [--json DIR]

Each row is written as it is measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from pagedweight.bench.arguments import positive, positive_float
from pagedweight.bench.decode_engine import Job, serve
from pagedweight.bench.models import MODELS, model_config
from pagedweight.bench.record import machine, read_record, write_record
from pagedweight.checkpoint.names import architecture_of
from pagedweight.checkpoint.plan import Plan, save_plan
from pagedweight.core.geometry import LayerShape
from pagedweight.errors import UserError
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.versions import vllm_version

PEERS = ("bf16", "marlin_int4")
ENGINES = (*PEERS, "3", "4", "5", "6", "mix4", "mix5")
BATCHES = (1, 4, 16, 64)
LEVELS = (3, 4, 5, 6)
SHARES = {
    "mix3": {2: 0.27, 3: 0.45, 4: 0.22, 5: 0.05, 6: 0.01},
    "mix4": {3: 0.4, 4: 0.3, 5: 0.2, 6: 0.1},
    "mix5": {3: 0.1, 4: 0.2, 5: 0.3, 6: 0.4},
}
"""Of the blocks at each level, before blocks are lowered until the bytes are the uniform's. mix3 is
about what elastic serving has at its floor; no engine here has it."""
PRELOADED = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"]
KV_SLACK = 1.02
KV_SPARE = 128
"""Tokens beside those of the requests: the null block, and rounding to blocks."""
RESULT = "decode_vllm.json"
PLAN = "plan.json"


def block_bytes(shape: LayerShape) -> np.ndarray:
    """int64 [2, 9]: bytes of a linear block by kind and bits (eq. 3)."""
    return np.array([[b.resident_bytes(n) if n else 0 for n in range(9)] for b in shape.blocks])


def plan_bytes(plan: Plan, shape: LayerShape) -> int:
    """Bytes of all routed experts at a plan [L, E, 2]."""
    return int(block_bytes(shape)[np.arange(2), plan].sum())


def engine_plan(name: str, layers: int, shape: LayerShape) -> Plan:
    """int8 [L, E, 2]: a level everywhere, or a random mix of no more bytes than that level's."""
    size = (layers, shape.experts, 2)
    if name not in SHARES:
        return np.full(size, int(name), np.int8)
    budget = plan_bytes(np.full(size, int(name[-1]), np.int8), shape)
    random = np.random.default_rng(0)
    shares, lowest = SHARES[name], min(SHARES[name])
    plan = random.choice(np.int8(list(shares)), size, p=list(shares.values()))
    order = random.permutation(plan.size)
    sizes, flat = block_bytes(shape), plan.reshape(-1)
    excess = plan_bytes(plan, shape) - budget
    for at in order:
        kind, bits = at % 2, flat[at]
        if excess > 0 and bits > lowest:
            excess -= int(sizes[kind, bits] - sizes[kind, bits - 1])
            flat[at] -= 1
    return plan


def peer_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a model that vLLM fills with random weights; int4 for routed experts only."""
    if name == "bf16":
        return dict(config)
    shape = architecture_of(config).facts(config).shape
    gptq = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size(shape),
        "sym": True,
        "desc_act": False,
        "modules_in_block_to_quantize": ["experts"],
    }
    return {**config, "quantization_config": gptq}


def group_size(shape: LayerShape) -> int:
    """Weights that share a scale in int4: 128, or 64 where rows are no multiple of that."""
    return 128 if shape.intermediate % 128 == 0 else 64


def kv_cache_bytes(
    config: Mapping[str, Any], requests: int, tokens: int, ranks: int = 1, value_bytes: int = 2
) -> int:
    """KV cache in which each of `ranks` holds its part of `requests` of `tokens` tokens."""
    layers = architecture_of(config).facts(config).kv
    values = sum(layer.values(ranks) for layer in layers)
    return int((KV_SLACK * requests * (tokens + 64) + KV_SPARE) * values * value_bytes)


def arguments(folder: Path, name: str, options: argparse.Namespace, config: dict) -> dict[str, Any]:
    """vLLM's LLM for one engine: alike for all but the weights."""
    most = max(options.batch)
    found: dict[str, Any] = {
        "model": str(folder / (name if name in PEERS else "pagedweight")),
        "load_format": "dummy",
        "dtype": config["dtype"],
        "skip_tokenizer_init": True,
        "max_model_len": options.sequence + 64,
        "max_num_seqs": most,
        "max_num_batched_tokens": options.batched_tokens,
        "gpu_memory_utilization": 0.05,  # only checked at start: the size of the cache is given
        "kv_cache_memory_bytes": kv_cache_bytes(config, most, options.sequence),
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": sorted(set(options.batch))},
        "disable_log_stats": True,
        "seed": 0,
    }
    if options.attention:
        found["attention_config"] = {"backend": options.attention}
    if name not in PEERS:
        # A relative name: `describe` writes each plan into its engine's directory.
        found["additional_config"] = ServeOptions(plan=PLAN).additional_config()
    return found


class Engine:
    """A process that serves a job; ended with all its children by `end`."""

    def __init__(self, job: Job, serve: Callable[[Job, Connection], None] = serve) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(job, theirs))
        self._process.start()
        theirs.close()

    def answer(self, limit: float) -> Any:
        """What it sends next; RuntimeError with its own words, or when nothing comes in time."""
        if not self._connection.poll(limit):
            raise RuntimeError(f"no answer in {limit:.0f} s")
        try:
            found = self._connection.recv()
        except EOFError:
            raise RuntimeError("the engine's process ended without a word") from None
        if isinstance(found, str):
            raise RuntimeError(found.strip().splitlines()[-1])
        return found

    def answers(self, limit: float) -> Iterator[Any]:
        """All that it sends until it says that this was all; each as `answer`."""
        while (found := self.answer(limit)) is not None:
            yield found

    def go(self) -> None:
        """Let a started engine be timed."""
        self._connection.send("go")

    def end(self, patience: float = 10) -> None:
        """Let it end by itself for some seconds, then kill what is left of it."""
        self._connection.close()
        self._process.join(patience)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()


def import_once() -> None:
    """Start importing vLLM in the process that all engines are forked from."""
    forkserver.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def run_together(jobs: Mapping[str, Job], limit: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start engines side by side, then time one after the other while the rest stand still.

    Each row as it comes, with its engine's name; of an engine that fails, a last row that says why.
    """
    engines = {name: Engine(job) for name, job in jobs.items()}
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    try:
        for name, engine in engines.items():
            try:
                _, seconds[name] = engine.answer(limit)
            except RuntimeError as error:
                failed[name] = str(error)
        for name, engine in engines.items():
            if name not in failed:
                try:
                    engine.go()
                    for row in engine.answers(limit):
                        yield name, {**row, "start_s": round(seconds[name], 1)}
                except (RuntimeError, OSError) as error:
                    failed[name] = str(error)
            if name in failed:
                yield name, {"failed": failed[name]}
            engine.end()
    finally:
        for engine in engines.values():
            engine.end(patience=1)


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of every engine, written as they come."""
    config = model_config(options.model, options.layers)
    rows = kept_rows(options, config["num_hidden_layers"]) if options.json and options.add else []
    import_once()
    prepare(folder, options, config)
    for first in range(0, len(options.engine), options.together):
        names = options.engine[first : first + options.together]
        about = {name: describe(folder, name, options, config) for name in names}
        jobs = {name: job_of(folder, name, options, config) for name in names}
        for name, row in run_together(jobs, options.limit):
            rows.append({**about[name], **row})
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
            if options.json:
                write(options.json, rows)
    return rows


def job_of(folder: Path, name: str, options: argparse.Namespace, config: dict[str, Any]) -> Job:
    """What an engine's process is given."""
    return Job(
        directory=folder / "engines" / name,
        arguments=arguments(folder, name, options, config),
        vocabulary=config["vocab_size"],
        batches=options.batch,
        prompt_tokens=options.sequence - options.new_tokens,
        new_tokens=options.new_tokens,
        repeats=options.repeats,
    )


def describe(
    folder: Path, name: str, options: argparse.Namespace, config: Mapping[str, Any]
) -> dict[str, Any]:
    """What a row says about its engine; writes the plan that it will serve."""
    facts = architecture_of(config).facts(config)
    layers, shape = len(facts.moe_layers), facts.shape
    row: dict[str, Any] = {"model": options.model, "layers": config["num_hidden_layers"]}
    row |= {"engine": name, "sequence": options.sequence, "new_tokens": options.new_tokens}
    row |= {"measured": date.today().isoformat(), "transformers": version("transformers")}
    row |= {"attention": options.attention} if options.attention else {}
    (folder / "engines" / name).mkdir(parents=True, exist_ok=True)
    if name in PEERS:
        weights = 3 * layers * shape.experts * shape.hidden * shape.intermediate
        bits = 16.0 if name == "bf16" else 4 + 16 / group_size(shape)
        return row | {"expert_gb": round(weights * bits / 8e9, 3)}
    plan = engine_plan(name, layers, shape)
    save_plan(folder / "engines" / name / PLAN, plan)
    counts = {str(b): int((plan == b).sum()) for b in np.unique(plan)}
    return row | {"expert_gb": round(plan_bytes(plan, shape) / 1e9, 3), "blocks_at_bits": counts}


def prepare(folder: Path, options: argparse.Namespace, config: dict[str, Any]) -> None:
    """What the engines serve: a checkpoint of our own, and config.json alone for the others."""
    for name in PEERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(peer_config(name, config)))
    ours = folder / "pagedweight"
    if set(options.engine) <= set(PEERS) or (ours / "pagedweight.json").exists():
        return
    command = [sys.executable, "-m", "pagedweight.bench.synthetic", options.model, str(ours)]
    layers = ["--layers", str(options.layers)] if options.layers else []
    levels = [str(level) for level in LEVELS]
    # In a process of its own: this one must not hold a GPU context while engines are timed.
    subprocess.run([*command, "--bits", *levels, *layers], check=True)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """decode_vllm.json."""
    write_record(path / RESULT, {"machine": about_machine(), "rows": rows})


def about_machine() -> dict[str, Any]:
    """Where and with what it was measured."""
    return {"gpu": gpu_name(), **machine(), "vllm": vllm_version()}


def kept_rows(options: argparse.Namespace, layers: int) -> list[dict[str, Any]]:
    """Rows of the file that is there, without those of the engines that are measured again.

    Raises UserError when they are of another machine or other versions.
    """
    path = options.json / RESULT
    if not path.exists():
        return []
    found = read_record(path)
    if found.get("machine") != about_machine():
        raise UserError(f"{path} was measured elsewhere; write to another folder, or without --add")
    again = [(options.model, layers, name) for name in options.engine]
    rows = found["rows"]
    keys = ("model", "layers", "engine")
    return [row for row in rows if tuple(row.get(key) for key in keys) not in again]


def gpu_name() -> str:
    """Name of the first GPU; UserError without one. Asks without making a context."""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError("bench decode serves through vLLM on a GPU and needs one") from error
    return found.splitlines()[0]


def main(argv: Sequence[str] | None = None) -> None:
    """Start the engines one after the other, print, and with --json write decode_vllm.json."""
    parser = argparse.ArgumentParser(prog="pagedweight bench decode", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="qwen1.5-moe", help="whose shape")
    parser.add_argument("--layers", type=positive, help="only so many of the model's layers")
    parser.add_argument(
        "--engine", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: all"
    )
    parser.add_argument(
        "--batch", nargs="+", type=positive, default=list(BATCHES), help="sequences at a time"
    )
    parser.add_argument("--sequence", type=positive, default=2048, help="tokens at the end")
    parser.add_argument("--new-tokens", type=positive, default=128, help="tokens sampled")
    parser.add_argument("--batched-tokens", type=positive, default=8192, help="most in a step")
    parser.add_argument("--repeats", type=positive, default=2, help="of each measurement")
    parser.add_argument(
        "--limit", type=positive_float, default=600, help="seconds for a start, and for a row"
    )
    parser.add_argument(
        "--attention",
        help="vLLM's attention backend, by its name; default: vLLM's choice. Gemma 4 on Hopper "
        "needs TRITON_ATTN where CUTLASS DSL is not installed",
    )
    parser.add_argument(
        "--together", type=positive, default=1, help="engines to start side by side"
    )
    parser.add_argument("--folder", type=Path, help="where checkpoints are made, kept there")
    parser.add_argument("--json", type=Path, help="folder for decode_vllm.json")
    parser.add_argument("--add", action="store_true", help="keep other rows of that file")
    options = parser.parse_args(argv)
    gpu_name()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and its engines
    if options.folder:
        measure(options.folder, options)
        return
    with tempfile.TemporaryDirectory(prefix="pagedweight-decode-") as folder:
        measure(Path(folder), options)


if __name__ == "__main__":
    main()
