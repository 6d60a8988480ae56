"""How long does one planner step take, at the sizes of three real models?

    python -m pagedweight.bench.planner [--steps N] [--output FILE]

Random calibration with the spread of a measured one; pages of 2 MiB; fixed seed. Every case is
checked against a planner that sorts everything, timed in the same run. Wall time has whatever else
the machine does in it; CPU time of the thread does not, so both are given. Writes JSON.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pagedweight.bench.record import machine, write_record
from pagedweight.core.calibration import Calibration
from pagedweight.core.geometry import LayerShape
from pagedweight.core.observation import (
    BatchSignals,
    KVPressure,
    Observation,
    RequestSignals,
    merge_signals,
)
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import Plan, PlanContext, PlanQueue, TableState, plan_step
from pagedweight.core.planner.score import predict_damage
from pagedweight.core.policy import Policy
from pagedweight.core.size_table import BlockIndex, SizeTable

LEVELS = (2, 3, 4, 5, 6)
PAGE_BYTES = 2 << 20
BLOCK_BYTES = 3 << 20
SIGNAL_SETS = 8
MODELS = {
    "mixtral-8x7b": (32, LayerShape(8, 4096, 14336)),
    "qwen1.5-moe-a2.7b": (24, LayerShape(60, 2048, 1408)),
    "gemma-4-26b-a4b": (30, LayerShape(128, 2816, 704)),
}


Times = tuple[float, float, float, float]
"""Wall p50 and p99, CPU p50 and p99, in milliseconds."""


@dataclass(frozen=True)
class Row:
    """One line of the result; times in milliseconds."""

    model: str
    rows: int
    case: str
    kind: str
    rows_moved: int
    wall_p50: float
    wall_p99: float
    cpu_p50: float
    cpu_p99: float


def context_for(layers: int, shape: LayerShape, seed: int = 0) -> PlanContext:
    """A planner over random calibration: blocks differ 200 times and more, a bit cuts damage 4."""
    rng, experts, steps = np.random.default_rng(seed), shape.experts, len(LEVELS) - 1
    tokens = rng.integers(100, 1000, (layers, experts))
    spread = rng.lognormal(0, 1.5, (layers, experts, 2, 1)) * np.array([[1.0], [2.2]])
    noise = rng.lognormal(0, 0.05, (layers, experts, 2, len(LEVELS)))
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "mass": tokens / tokens.sum(1, keepdims=True),
        "sensitivity": spread * 4.0 ** -np.arange(len(LEVELS)) * noise,
        "residual.center": rng.normal(0, 1, (layers, experts, 2, 3)),
        "residual.weight": rng.normal(0, 0.3, (2, steps, 3)),
        "residual.bias": np.zeros((2, steps)),
        "residual.confidence": np.full((2, steps), 0.6),
        "residual.clip": np.tile([-2.0, 2.0], (2, steps, 1)),
    }
    calibration = Calibration.from_arrays(arrays, LEVELS)
    sizes = SizeTable.of(shape, LEVELS)
    policy = replace(Policy(), offload_pages_per_step=10**9)
    return PlanContext.of(BlockIndex(layers, experts), sizes, calibration, policy, PAGE_BYTES)


def requests_for(context: PlanContext) -> list[RequestSignals]:
    """Different runtime signals, one request each."""
    rng, (layers, experts, _) = np.random.default_rng(1), context.index.shape
    return [
        RequestSignals(
            kv_blocks=100,
            tokens=500.0,
            mass=rng.uniform(0, 10, (layers, experts)).astype(np.float32),
            features=(500 * rng.lognormal(0, 1, (layers, experts, 2, 3))).astype(np.float32),
        )
        for _ in range(SIGNAL_SETS)
    ]


def timed(call: Callable[[int], object], steps: int) -> Times:
    """Times over `steps` calls."""
    wall, cpu = np.empty(steps), np.empty(steps)
    for at in range(steps):
        start, busy = time.perf_counter_ns(), time.thread_time_ns()
        call(at)
        cpu[at], wall[at] = time.thread_time_ns() - busy, time.perf_counter_ns() - start
    p50, p99 = np.percentile(wall, [50, 99]) / 1e6
    cpu50, cpu99 = np.percentile(cpu, [50, 99]) / 1e6
    return float(p50), float(p99), float(cpu50), float(cpu99)


def observations(
    context: PlanContext, signals: Sequence[BatchSignals | None]
) -> dict[str, tuple[int, KVPressure, Sequence[BatchSignals | None]]]:
    """Cases: (bits of the table, pressure, signals to go round)."""
    rows = context.index.rows
    top, floor = (context.sizes.total(np.full(rows, b, np.int32)) for b in (6, 3))
    whole = (top - floor) // BLOCK_BYTES
    idle = KVPressure(BLOCK_BYTES, 1 << 20, 2000, 40)
    loaded = replace(idle, free_blocks=0, pending_blocks=max(1, whole * 3 // 10))
    return {
        "idle, kept signals": (6, idle, signals[:1]),
        "offload 30%, kept signals": (6, loaded, signals[:1]),
        "offload 30%, new signals": (6, loaded, signals),
        "all stages fail, new signals": (6, replace(loaded, pending_blocks=2 * whole), signals),
        "reload, new signals": (3, replace(idle, free_blocks=1000), signals),
    }


def sorted_prefix(
    context: PlanContext, signals: BatchSignals | None, bits: int, target: int
) -> tuple[int, float]:
    """The plan of a planner that sorts every step: (bytes of pages returned, predicted damage)."""
    damage = predict_damage(context, signals)
    floors = context.stages[0].floors[damage.bucket]
    now = np.full(context.index.rows, bits - LEVELS[0], np.int8)
    key = np.maximum.accumulate(damage.per_byte[::-1], axis=0)[::-1]
    legal = context.between(floors, now)
    steps, rows = np.nonzero(legal)
    order = np.lexsort((-steps, rows, key[steps, rows]))
    steps, rows = steps[order], rows[order]
    slots = context.slots(now) + np.cumsum(context.step_slots[steps * 2 + rows % 2], axis=0)
    returned = context.pages.held(context.slots(now)) - context.pages.held(slots)
    count = int(np.argmax(returned >= target)) + 1
    harm = damage.predicted[steps[:count], rows[:count]].sum(dtype=np.float64)
    return int(returned[count - 1]), float(harm) * context.damage_unit


def check(context: PlanContext, plan: Plan, signals: BatchSignals | None, bits: int) -> None:
    """Raise AssertionError unless the plan is the sorted one, or better by pruning alone."""
    if plan.kind != "offload" or not plan.satisfied:
        return
    returned, damage = sorted_prefix(context, signals, bits, plan.target_bytes)
    assert plan.target_bytes <= plan.returned_bytes <= returned, (plan.returned_bytes, returned)
    assert plan.damage <= damage * (1 + 1e-4), (plan.damage, damage)
    assert plan.damage >= 0.9 * damage, (plan.damage, damage)


def run_model(name: str, steps: int) -> list[Row]:
    """All cases of one model."""
    layers, shape = MODELS[name]
    context = context_for(layers, shape)
    requests, calibration = requests_for(context), context.calibration
    prior = context.policy.prior_tokens
    signals = [merge_signals([request], calibration, prior) for request in requests]
    out = []
    for case, (bits, kv, seen) in observations(context, signals).items():
        state = TableState.of(WeightPageTable(context.index, context.sizes, bits))
        queue, plan = plan_step(state, Observation(0, kv, seen[0]), context, PlanQueue())
        check(context, plan, seen[0], bits)

        def one(at: int, state: TableState = state, case: tuple[Any, ...] = (kv, seen)) -> None:
            nonlocal queue
            pressure, pool = case
            queue = replace(queue, last_pressure_step=None)
            seen_now = Observation(at, pressure, pool[at % len(pool)])
            queue, _ = plan_step(state, seen_now, context, queue)

        times = timed(one, steps)
        out.append(_row(name, context, case, times, plan))
    merge = timed(lambda at: merge_signals([requests[at % SIGNAL_SETS]], calibration, prior), steps)
    out.append(_row(name, context, "merge one request's signals", merge))
    target = int(0.3 * context.sizes.total(np.full(context.index.rows, 6, np.int32)) / 2)
    full = timed(lambda at: sorted_prefix(context, signals[at % SIGNAL_SETS], 6, target), 20)
    out.append(_row(name, context, "peer: sort every step", full))
    return out


def _row(name: str, context: PlanContext, case: str, times: Times, plan: Plan | None = None) -> Row:
    plan = Plan.none() if plan is None else plan
    rounded = [round(value, 3) for value in times]
    return Row(name, context.index.rows, case, plan.kind, len(plan.rows), *rounded)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/planner.json"))
    options = parser.parse_args(arguments)
    load = round(os.getloadavg()[0], 1)
    rows = [row for name in MODELS for row in run_model(name, options.steps)]
    print(f"{'rows':>5}  {'case':32} {'moved':>6}   wall p50    p99    CPU p50    p99  (ms)")
    for row in rows:
        print(
            f"{row.rows:5}  {row.case:32} {row.rows_moved:6}   {row.wall_p50:8.3f} "
            f"{row.wall_p99:6.2f}   {row.cpu_p50:8.3f} {row.cpu_p99:6.2f}"
        )
    record = {
        "question": "time of one planner step in milliseconds, wall and CPU",
        "machine": machine() | {"load_before": load},
        "steps": options.steps,
        "page_bytes": PAGE_BYTES,
        "rows": [asdict(row) for row in rows],
    }
    write_record(options.output, record)


if __name__ == "__main__":
    main()
