"""Running the tasks: lm-eval's evaluator over lm-eval's vLLM model, with our quantization in it.

The engine is the one that serves, so what is measured is what a user gets: at fixed bits, or
elastic under a memory budget. Prompts longer than the context allows lose their middle, as in
LongBench.
Tested with lm-eval 0.4.13 and vLLM 0.32 on the CPU. Relies on: lm_eval.models.vllm_causallms.VLLM,
lm_eval.tasks.TaskManager (custom_dataset, include_path), lm_eval.evaluator.evaluate.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from pagedweight.checkpoint.manifest import MANIFEST
from pagedweight.checkpoint.names import text_config
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.shards import read_json
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.errors import UserError, listing
from pagedweight.eval.evaluate import expert_bytes
from pagedweight.eval.tasks import FOLDER, TASKS
from pagedweight.eval.tasks.interval import interval
from pagedweight.eval.vllm_engine import kv_bytes, quiet_engine
from pagedweight.runtime.timeline import Timeline
from pagedweight.serving.elastic.budget import check_memory, fixed_bits, plan_context
from pagedweight.serving.launch import elastic_classes
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.plans import plan_of
from pagedweight.serving.versions import vllm_named

CONCURRENT = 8
"""Requests that run together on the CPU; their KV is reserved."""


@dataclass(frozen=True)
class TaskOptions:
    """What is run, and how.

    path: a quantized checkpoint, or an unquantized one (then `serve` must be as it is by default).
    names: keys of TASKS. data_dir: the folder that TASKS' files lie below. limit: documents of each
    task, the first ones; None: all. serve: bits, plan, or memory with a policy. dtype: vLLM's, None
    for the model's own. seed: of the intervals.
    """

    path: Path
    names: tuple[str, ...]
    data_dir: Path
    limit: int | None = None
    serve: ServeOptions = field(default_factory=ServeOptions)
    dtype: str | None = None
    seed: int = 0


def run_tasks(options: TaskOptions) -> dict[str, Any]:
    """Check everything, start one engine, run all tasks; the result is ready for JSON.

    Raises UserError.
    """
    checkpoint = _check(options)
    with TemporaryDirectory() as folder, quiet_engine():
        timeline = Path(folder) / "run.jsonl"
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        tasks = _load_tasks(options)
        room = max(task.config.generation_kwargs["max_gen_toks"] for task in tasks.values())
        context = _context(options.path, room)
        arguments = engine_arguments(options, checkpoint is not None, context, timeline)
        model = _model(options.path, context, arguments)
        try:
            from lm_eval.evaluator import evaluate

            found = evaluate(model, {"tasks": tasks}, limit=options.limit, bootstrap_iters=0)
            rows = [_row(options, name, tasks[name], found, model) for name in options.names]
        finally:
            model.model.llm_engine.engine_core.shutdown()
        precision = _precision(options, checkpoint, timeline)
    return {
        "path": str(options.path),
        "engine": "vllm",
        "dtype": options.dtype or "auto",
        "precision": precision,
        "context": model.max_length,
        "lm_eval": version("lm_eval"),
        "tasks": rows,
    }


def _check(options: TaskOptions) -> Checkpoint | None:
    """Everything that can be wrong before an engine starts; the checkpoint, None if unquantized."""
    if not options.names:
        raise UserError(f"--tasks names no task; there are {listing(TASKS)}")
    if unknown := [name for name in options.names if name not in TASKS]:
        raise UserError(f"--tasks: no task {listing(unknown)}; there are {listing(TASKS)}")
    if twice := sorted({name for name in options.names if options.names.count(name) > 1}):
        raise UserError(f"--tasks names {listing(twice)} more than once")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit {options.limit}: give at least 1, or leave it out for all")
    files = (options.data_dir / file for name in options.names for file in TASKS[name].files)
    if absent := sorted({str(file) for file in files if not file.is_file()}):
        raise UserError(f"--data-dir {options.data_dir} lacks {listing(absent)}")
    if _lacks("lm_eval"):
        raise UserError("--tasks needs lm-eval: pip install 'pagedweight[eval]'")
    if not (options.path / MANIFEST).exists():
        SourceCheckpoint.open(options.path)
        if options.serve != ServeOptions():
            raise UserError(f"{options.path} is not quantized: bits, plans and memory do not apply")
        return None
    checkpoint = Checkpoint.open(options.path)
    plan_of(checkpoint, options.serve)
    if options.serve.budgeted:
        context = plan_context(checkpoint, options.serve, 1)
        check_memory(context, options.serve, fixed_bits(checkpoint, options.serve))
    return checkpoint


def _lacks(package: str) -> bool:
    """Whether an import of `package` would fail; a module set to None counts as missing."""
    try:
        return find_spec(package) is None
    except ValueError:
        return True


def _context(path: Path, room: int) -> int:
    """The model's positions; UserError when answers of `room` tokens leave none for a prompt."""
    positions = text_config(read_json(path / "config.json"))["max_position_embeddings"]
    if positions < 2 * room:
        raise UserError(
            f"{path} has {positions} positions; these tasks write {room} tokens and need as many "
            "for the prompt: leave tasks out"
        )
    return int(positions)


def _load_tasks(options: TaskOptions) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    metadata: Any = {"data_dir": str(options.data_dir)}
    manager = TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata)
    tasks: dict[str, Any] = manager.load(list(options.names))["tasks"]
    return tasks


def engine_arguments(
    options: TaskOptions, quantized: bool, context: int, timeline: Path
) -> dict[str, Any]:
    """Of vLLM's `LLM`, beyond the model and its context. An elastic run writes `timeline`."""
    serve = options.serve
    arguments: dict[str, Any] = {"dtype": options.dtype or "auto", "disable_log_stats": True}
    if not torch.cuda.is_available():
        arguments["max_num_seqs"] = CONCURRENT
        arguments["kv_cache_memory_bytes"] = CONCURRENT * kv_bytes(options.path, context)
        arguments["enforce_eager"] = True
    if quantized:
        asked = replace(serve, timeline=str(timeline)) if serve.budgeted else serve
        arguments["additional_config"] = asked.additional_config()
    if serve.budgeted:
        arguments["scheduler_cls"], arguments["worker_cls"] = elastic_classes()
        arguments["kv_cache_memory_bytes"] = serve.memory
    return arguments


def _model(path: Path, context: int, arguments: dict[str, Any]) -> Any:
    """lm-eval's vLLM model on one engine."""
    with vllm_named():
        from lm_eval.models.vllm_causallms import VLLM

    return VLLM(
        str(path),
        max_model_len=context,
        truncation_side="middle",
        batch_size="auto",
        **arguments,
    )


def _row(
    options: TaskOptions, name: str, task: Any, found: dict[str, Any], model: Any
) -> dict[str, Any]:
    """One task's score with its interval over documents, and what was done to get it."""
    about, samples = TASKS[name], found["samples"][name]
    values = np.array([sample[about.metric] for sample in samples])
    new_tokens = task.config.generation_kwargs["max_gen_toks"]
    lengths = _lengths(model, [sample["arguments"][0][0] for sample in samples])
    estimate = asdict(interval(values, options.seed))
    return {
        "task": name,
        "label": about.label,
        "caveat": about.caveat,
        "metric": about.metric,
        "value": estimate["mean"],
        "low": estimate["low"],
        "high": estimate["high"],
        "items": len(values),
        "items_in_file": found["n-samples"][name]["original"],
        "examples_in_prompt": task.config.num_fewshot,
        "new_tokens": new_tokens,
        "prompt_tokens_mean": float(lengths.mean()),
        "truncated": int((lengths + new_tokens > model.max_length).sum()),
        "values": values.tolist(),
    }


def _lengths(model: Any, prompts: Sequence[str]) -> np.ndarray:
    return np.array([len(tokens) for tokens in model.tok_encode(list(prompts))])


def _precision(
    options: TaskOptions, checkpoint: Checkpoint | None, timeline: Path
) -> dict[str, Any] | None:
    """Bits that were served: the plan's, or over the steps of an elastic run; None: unquantized."""
    if checkpoint is None:
        return None
    serve = options.serve
    if serve.budgeted:
        bits = Timeline.load(timeline).column("bits")
        found = {"mean_bits": float(bits.mean()), "lowest_mean_bits": float(bits.min())}
        return {**found, "budget_bytes": serve.memory, "policy": serve.policy}
    plan = plan_of(checkpoint, serve)
    return {
        "mean_bits": float(plan.mean()),
        "uniform": bool((plan == plan.flat[0]).all()),
        "expert_bytes": expert_bytes(checkpoint, plan),
    }
