"""The `vllm serve` command line that serves a checkpoint with given options.

Everything that can be wrong is checked here, before vLLM spends half a minute on starting.
Relies on: `vllm serve --additional-config`. Tested with vLLM 0.26 and 0.32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.policies import Assignment
from pagedweight.errors import UserError
from pagedweight.runtime.timeline import check_writable
from pagedweight.runtime.trace import BitTrace
from pagedweight.serving.conflicts import (
    has,
    refuse_on_cpu,
    refuse_with_holdings,
    refuse_with_memory,
)
from pagedweight.serving.elastic.backend import on_gpu
from pagedweight.serving.elastic.budget import (
    check_cut,
    check_memory,
    fixed_bits,
    plan_context,
)
from pagedweight.serving.elastic.dealing import Dealing, Parallel
from pagedweight.serving.elastic.gpu_budget import within_gpu
from pagedweight.serving.elastic.tracing import check_trace
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.plans import assignment_of
from pagedweight.serving.versions import check_version, vllm_release

_FLAG = "--additional-config"
_ELASTIC = "pagedweight.serving.elastic"
SCHEDULER = f"{_ELASTIC}.scheduler.ElasticScheduler"
ASYNC_SCHEDULER = f"{_ELASTIC}.scheduler.ElasticAsyncScheduler"
WORKER = f"{_ELASTIC}.worker.ElasticCPUWorker"
GPU_WORKER = f"{_ELASTIC}.gpu_worker.ElasticGPUWorker"


def vllm_command(path: Path, options: ServeOptions, extra: Sequence[str]) -> list[str]:
    """Arguments, interpreter first. UserError on a broken checkpoint, plan, level or flag."""
    check_version(*vllm_release())
    checkpoint = Checkpoint.open(path)
    assignment = assignment_of(checkpoint, options)
    if options.timeline is not None:
        check_writable(options.timeline)
    users, rest = _take(list(extra))
    if options.gpu_memory is not None:
        options = within_gpu(checkpoint, options, rest)
    if options.budgeted and assignment.high is not None:
        options, rest = _beside_two_levels(checkpoint, assignment, options, rest)
    check_cut(checkpoint.shape, Parallel.of_arguments(rest).cuts)
    if not torch.cuda.is_available():
        refuse_on_cpu(rest)
    config = {**users, **options.additional_config()}
    return [
        sys.executable,
        "-m",
        "pagedweight.serving.vllm_cli",
        "serve",
        str(path),
        _FLAG,
        json.dumps(config),
        *(_classes(checkpoint, options, rest) if options.budgeted else ()),
        *rest,
    ]


def _classes(checkpoint: Checkpoint, options: ServeOptions, rest: list[str]) -> list[str]:
    """The flags that put our scheduler and worker in; UserError on what they do not go with."""
    refuse_with_memory(rest)
    dealing = Dealing.of(checkpoint, Parallel.of_arguments(rest))
    if dealing.holdings.count > 1:
        refuse_with_holdings(options, dealing.parallel.pipeline)
    if options.trace is not None:
        check_trace(options.trace)
    if options.replay is not None:
        BitTrace.load(options.replay)
    context = plan_context(checkpoint, options, dealing.parallel.cuts)
    fixed = dealing.rows_of(fixed_bits(checkpoint, options))
    for of, bits in zip(dealing.contexts(context), fixed, strict=True):
        check_memory(of, options, bits)
    kv = ["--kv-cache-memory-bytes", str(options.memory), *_share(options, rest)]
    scheduler, worker = elastic_classes(rest)
    return ["--scheduler-cls", scheduler, "--worker-cls", worker, *kv]


def _beside_two_levels(
    checkpoint: Checkpoint, assignment: Assignment, options: ServeOptions, rest: list[str]
) -> tuple[ServeOptions, list[str]]:
    """--memory less what two levels of every block take is a KV cache of fixed size: bits stay, so
    nothing has to come and go. UserError when nothing is left for it."""
    refuse_with_memory(rest)
    sizes = ("plan", "memory", "gpu_memory", "gpu_reserve")
    plain = ServeOptions(**{name: getattr(options, name) for name in sizes})
    if options != plain:
        other = [name for name, value in vars(options).items() if value != vars(plain)[name]]
        given = [f"--{name.replace('_', '-')}" for name in other]
        raise UserError(f"{', '.join(given)} does not go with --plan {options.plan}: bits stay")
    dealing = Dealing.of(checkpoint, Parallel.of_arguments(rest))
    if dealing.holdings.count > 1:
        raise UserError(
            f"--memory with --plan {options.plan} counts both levels of every expert on each rank: "
            "not with --enable-expert-parallel or --pipeline-parallel-size"
        )
    context = plan_context(checkpoint, options, dealing.parallel.cuts)
    held = assignment.resident_bytes(context.sizes)
    assert options.memory is not None
    if options.memory <= held:
        raise UserError(
            f"--memory {options.memory}: both levels of --plan {options.plan} take {held} bytes "
            f"alone; give more, or a smaller budget"
        )
    kv = ["--kv-cache-memory-bytes", str(options.memory - held), *_share(options, rest)]
    return ServeOptions(plan=options.plan), [*kv, *rest]


def _share(options: ServeOptions, rest: Sequence[str]) -> list[str]:
    """vLLM's start-up check of free memory made one of this budget, unless the user gave a share:
    its default asks for 92% of the GPU, whatever else runs there."""
    if not on_gpu() or has(rest, "--gpu-memory-utilization"):
        return []
    wanted = options.gpu_memory or options.memory or 0
    share = wanted / torch.cuda.get_device_properties(0).total_memory
    return ["--gpu-memory-utilization", f"{min(1.0, max(0.0001, share)):.4f}"]


def elastic_classes(arguments: Sequence[str] = ()) -> tuple[str, str]:
    """Scheduler and worker of elastic serving on this machine, under vLLM's `arguments`."""
    ahead = on_gpu() and not has(arguments, "--no-async-scheduling")
    return ASYNC_SCHEDULER if ahead else SCHEDULER, GPU_WORKER if on_gpu() else WORKER


def _take(extra: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The user's own --additional-config, parsed, and the other arguments."""
    for index, argument in enumerate(extra):
        if argument == _FLAG and index + 1 < len(extra):
            value, rest = extra[index + 1], extra[:index] + extra[index + 2 :]
        elif argument.startswith(f"{_FLAG}="):
            value, rest = argument.split("=", 1)[1], extra[:index] + extra[index + 1 :]
        else:
            continue
        try:
            users = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"{_FLAG} is not JSON ({error}): {value}") from error
        if not isinstance(users, dict):
            raise UserError(f"{_FLAG} must be a JSON object, not {value}")
        return users, rest
    return {}, extra
