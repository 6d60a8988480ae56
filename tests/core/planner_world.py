"""Small worlds for planner tests, and the planner written plainly: loops, heaps, no shortcuts."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace

import numpy as np

from pagedweight.core.calibration import Calibration
from pagedweight.core.geometry import LayerShape
from pagedweight.core.observation import KVPressure
from pagedweight.core.planner.context import PlanContext
from pagedweight.core.planner.score import Damage, Rows, predict_damage
from pagedweight.core.policy import Bucket, FloorStage, Policy
from pagedweight.core.size_table import BlockIndex, SizeTable

SHAPE = LayerShape(experts=4, hidden=128, intermediate=64)
ONE_BUCKET = (Bucket(0.0, 1.0),)
ONE_STAGE = (FloorStage("floor", (3,)),)
SIMPLE = Policy(
    buckets=ONE_BUCKET,
    stages=ONE_STAGE,
    offload_blocks=4,
    reload_blocks=12,
    dwell_steps=5,
    reload_pages_per_step=1000,
)


def arrays(
    seed: int, layers: int = 2, experts: int = 4, levels: int = 5, convex: bool = True
) -> dict[str, np.ndarray]:
    """Random calibration tensors: lognormal blocks, each bit cuts damage about 4 times."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(50, 500, (layers, experts))
    base = rng.lognormal(0, 1.5, (layers, experts, 2, 1))
    noise = rng.lognormal(0, 0.05 if convex else 1.5, (layers, experts, 2, levels))
    return {
        "tokens": tokens,
        "mass": tokens / tokens.sum(1, keepdims=True),
        "sensitivity": base * 4.0 ** -np.arange(levels) * noise,
    }


def with_heads(data: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """`data` with residual heads."""
    rng = np.random.default_rng(seed)
    layers, experts, _, levels = data["sensitivity"].shape
    steps = levels - 1
    return data | {
        "residual.center": rng.normal(0, 1, (layers, experts, 2, 3)),
        "residual.weight": rng.normal(0, 0.4, (2, steps, 3)),
        "residual.bias": rng.normal(0, 0.1, (2, steps)),
        "residual.confidence": rng.uniform(0.2, 0.9, (2, steps)),
        "residual.clip": np.tile([-2.0, 2.0], (2, steps, 1)),
    }


def world(
    seed: int = 0,
    policy: Policy = SIMPLE,
    layers: int = 2,
    levels: tuple[int, ...] = (2, 3, 4, 5, 6),
    page_bytes: int = 1,
    convex: bool = True,
    heads: bool = False,
    resting_bits: np.ndarray | None = None,
) -> PlanContext:
    data = arrays(seed, layers, SHAPE.experts, len(levels), convex)
    return PlanContext.of(
        BlockIndex(layers, SHAPE.experts),
        SizeTable.of(SHAPE, levels),
        Calibration.from_arrays(with_heads(data, seed) if heads else data, levels),
        policy,
        page_bytes,
        resting_bits,
    )


def rows_at(context: PlanContext, levels: np.ndarray, damage: Damage | None = None) -> Rows:
    return Rows.of(context, damage or predict_damage(context, None), levels.astype(np.int8))


def pressure(free: int, pending: int = 0, usable: int = 1000, **more: int) -> KVPressure:
    kv = KVPressure(block_bytes=4096, total_blocks=100_001, usable_blocks=usable, free_blocks=free)
    return replace(kv, pending_blocks=pending, **more)


# -- the planner, plainly -------------------------------------------------------------------------


def held(context: PlanContext, levels: np.ndarray) -> int:
    """Bytes of whole pages behind rows at level indices, counted arena by arena."""
    slots: Counter[tuple[object, ...]] = Counter()
    size: dict[tuple[object, ...], int] = {}
    for row, level in enumerate(levels.tolist()):
        kind, bits = row % 2, context.sizes.levels[level]
        slots["plane", kind] += bits
        size["plane", kind] = context.sizes.plane_bytes[kind]
        slots["table", kind, bits] += 1
        size["table", kind, bits] = int(context.sizes.table_bytes[kind, level])
    page = context.pages.page_bytes
    return sum(-(-count * size[arena] // page) for arena, count in slots.items()) * page


def plain_offload(
    context: PlanContext, damage: Damage, now: np.ndarray, floor: np.ndarray, target: int
) -> np.ndarray:
    """Level indices after the cheapest available steps, one at a time, until `target` is met."""
    after = now.copy()
    start = held(context, now)

    def entry(row: int) -> tuple[float, int]:
        return float(damage.per_byte[after[row] - 1, row]), row

    heap = [entry(row) for row in range(len(now)) if now[row] > floor[row]]
    heapq.heapify(heap)
    while heap and start - held(context, after) < target:
        _, row = heapq.heappop(heap)
        after[row] -= 1
        if after[row] > floor[row]:
            heapq.heappush(heap, entry(row))
    if start - held(context, after) < target:  # with pages, another prefix may hold less
        target = start - held(context, np.minimum(now, floor))
    return plain_prune(context, damage, now, after, target)


def plain_prune(
    context: PlanContext, damage: Damage, now: np.ndarray, after: np.ndarray, target: int
) -> np.ndarray:
    """Undo deepest steps, most damaging first, while `target` bytes still come back."""
    start = held(context, now)
    while True:
        out = _plain_pass(context, damage, now, after, target - start)
        if (out == after).all():
            return out
        after = out


def _plain_pass(
    context: PlanContext, damage: Damage, now: np.ndarray, after: np.ndarray, least: int
) -> np.ndarray:
    out = after.copy()

    def still_enough(row: int) -> bool:
        trial = out.copy()
        trial[row] += 1
        return -held(context, trial) >= least

    deepest = {row: int(after[row]) for row in range(len(now)) if after[row] < now[row]}
    classes = {(level, row % 2) for row, level in deepest.items()}
    first = {c: min(r for r, level in deepest.items() if (level, r % 2) == c) for c in classes}
    fitting = {c for c in classes if still_enough(first[c])}
    while left := [r for r, level in deepest.items() if (level, r % 2) in fitting]:
        row = min(left, key=lambda r: (-float(damage.predicted[deepest[r], r]), r))
        if still_enough(row):
            out[row] += 1
            del deepest[row]
        else:
            fitting.discard((deepest[row], row % 2))
    return out


def plain_restore(
    context: PlanContext, damage: Damage, now: np.ndarray, spare: int, cap: int
) -> np.ndarray:
    """Level indices after the best upward steps that fit, one at a time."""
    out, start, top = now.copy(), held(context, now), context.steps

    def fits(row: int) -> bool:
        trial = out.copy()
        trial[row] += 1
        return held(context, trial) - start <= spare

    closed = set()
    for level in range(top):
        for kind in range(2):
            alone = [r for r in range(len(now)) if r % 2 == kind]
            if not _class_fits(context, now, level, kind, spare) and alone:
                closed.add((level, kind))
    heap = [
        (-float(damage.per_byte[now[row], row]), row) for row in range(len(now)) if now[row] < top
    ]
    heapq.heapify(heap)
    taken = 0
    while heap and taken < cap:
        _, row = heapq.heappop(heap)
        of = int(out[row]), row % 2
        if of in closed:
            continue
        if not fits(row):
            closed.add(of)
            continue
        out[row] += 1
        taken += 1
        if out[row] < top:
            heapq.heappush(heap, (-float(damage.per_byte[out[row], row]), row))
    return out


def _class_fits(context: PlanContext, now: np.ndarray, level: int, kind: int, spare: int) -> bool:
    """Whether one row of `kind` rising from `level` would fit, by slots (no such row is needed)."""
    slots = context.slots(now.astype(np.int8)).copy()
    before = int(context.pages.held(slots))
    slots -= context.step_slots[level * 2 + kind]
    return int(context.pages.held(slots)) - before <= spare
