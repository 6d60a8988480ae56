"""The plan before serving: bits of every row within a byte budget (paper 3.2, static assignment).

A multiple-choice knapsack. Rows start at the floor and rise along the lower convex hull of (bytes,
damage), most damage recovered per byte first; then pairs of rows swap bytes while that helps. The
linear relaxation's bound says how far from the optimum the result can be at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedweight.core.geometry import KINDS
from pagedweight.core.page_table import BitsArray
from pagedweight.core.planner.context import Levels, PlanContext
from pagedweight.core.planner.ledger import Ledger
from pagedweight.core.planner.swap import improve
from pagedweight.core.size_table import FloatArray, IntArray
from pagedweight.errors import UserError


@dataclass(frozen=True, eq=False)
class InitialPlan:
    """Bits before serving.

    bits:       int32 [rows].
    held_bytes: whole pages that they take, at most the budget.
    damage:     global damage (eq. 4) against all rows at the top level, in units of sensitivity.
    bound:      no assignment within the budget has less damage than this.
    """

    bits: BitsArray
    held_bytes: int
    damage: float
    bound: float


@dataclass(frozen=True, eq=False)
class _Edges:
    """Moves of rows along their hulls, level index `low` to `high`, all arrays [n].

    gain: damage recovered, in the context's unit; size: bytes, pages ignored.
    """

    row: IntArray
    low: IntArray
    high: IntArray
    gain: FloatArray
    size: FloatArray


def initial_plan(context: PlanContext, budget_bytes: int, swaps: bool = True) -> InitialPlan:
    """Bits that take at most `budget_bytes` of whole pages with the least global damage found.

    The floor is the lowest of the policy's usual stages; below the bytes of that, emergency floors
    when the policy allows them. Raises UserError, with both numbers, when even the floor does not
    fit. `swaps` False leaves the greedy assignment as it is.
    """
    floor = floor_level(context, budget_bytes)
    levels: Levels = np.full(context.index.rows, floor, np.int8)
    ledger = Ledger(context, context.slots(levels))
    edges = _hull(context, floor)
    spare = budget_bytes - int(context.pages.held(ledger.slots))
    for row, low, high in zip(
        edges.row.tolist(), edges.low.tolist(), edges.high.tolist(), strict=True
    ):
        if levels[row] == low:
            cost = _climb(ledger, row, range(low, high), spare)
            if cost is not None:
                spare -= cost
                levels[row] = high
    if swaps:
        improve(context, levels, ledger, spare, floor)
    return InitialPlan(
        bits=context.bits_of(levels),
        held_bytes=int(context.pages.held(context.slots(levels))),
        damage=_damage(context, levels),
        bound=_bound(context, edges, floor, budget_bytes),
    )


def floor_level(context: PlanContext, budget_bytes: int) -> int:
    """Level index that every row can have within the budget. Raises UserError if none."""
    usual = [stage for stage in context.stages if not stage.emergency]
    urgent = [stage for stage in context.stages if stage.emergency]
    for stages in (usual, *([stage] for stage in urgent)):
        level = min(int(stage.floors.min()) for stage in stages)
        least = min(max(int(stage.floors.min()), stage.least) for stage in stages)
        need = int(context.pages.held(context.slots(_all_at(context, least))))
        if need <= budget_bytes:
            return level
    bits = context.sizes.levels[least]
    raise UserError(
        f"a budget of {budget_bytes} bytes does not hold the routed experts at {bits} bits, the "
        f"lowest the policy allows: that takes {need} bytes"
    )


def _all_at(context: PlanContext, level: int) -> Levels:
    return np.full(context.index.rows, level, np.int8)


def _hull(context: PlanContext, floor: int) -> _Edges:
    """Edges of every row's lower convex hull from `floor` up, best damage per byte first."""
    top, rows = context.steps, np.arange(context.index.rows)
    sizes = context.sizes.resident[rows % len(KINDS)].T.astype(np.float64)
    recovered = np.zeros((top + 1, len(rows)))
    recovered[1:] = np.cumsum(context.global_damage.astype(np.float64), axis=0)
    at = np.full(len(rows), floor)
    parts: list[tuple[IntArray, IntArray, IntArray]] = []
    for low in range(floor, top):
        here = rows[at == low]
        gain = recovered[low + 1 :, here] - recovered[low, here]
        ratio = gain / (sizes[low + 1 :, here] - sizes[low, here])
        high = top - np.argmax(ratio[::-1], axis=0)  # the furthest of equals
        at[here] = high
        parts.append((here, np.full(len(here), low), high))
    none = np.empty(0, np.int64)
    row, low_of, high_of = (np.concatenate([none, *(p[i] for p in parts)]) for i in range(3))
    gain = recovered[high_of, row] - recovered[low_of, row]
    size = sizes[high_of, row] - sizes[low_of, row]
    order = np.lexsort((low_of, row, -gain / size))
    return _Edges(row[order], low_of[order], high_of[order], gain[order], size[order])


def _climb(ledger: Ledger, row: int, steps: range, spare: int) -> int | None:
    """Raise `row` over `steps` and return the bytes it took; None, and no change, if too many."""
    kinds, cost = len(KINDS), 0
    classes = [step * kinds + row % kinds for step in steps]
    for of in classes:
        cost += ledger.cost_of_rise(of)
        ledger.rise(of)
    if cost <= spare:
        return cost
    for of in classes:
        ledger.rise(of, -1)
    return None


def _damage(context: PlanContext, levels: Levels) -> float:
    missing = context.between(levels, None)
    return float(context.global_damage[missing].sum(dtype=np.float64)) * context.damage_unit


def _bound(context: PlanContext, edges: _Edges, floor: int, budget: int) -> float:
    """Damage of the linear relaxation: edges in order, the last one in part; pages ignored."""
    start = _all_at(context, floor)
    spare = float(budget - context.sizes.total(context.bits_of(start)))
    before = np.cumsum(edges.size) - edges.size
    share = np.clip((spare - before) / edges.size, 0.0, 1.0)
    recovered = float(edges.gain @ share) * context.damage_unit
    return max(0.0, _damage(context, start) - recovered)
