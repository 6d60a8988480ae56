"""GreedySelect: cheapest steps first until whole pages meet the target (Algorithm 1 line 7)."""

from __future__ import annotations

import numpy as np

from pagedweight.core.geometry import KINDS
from pagedweight.core.planner.context import Levels, PlanContext
from pagedweight.core.planner.order import Cut, Span, cut
from pagedweight.core.planner.plan import Plan
from pagedweight.core.planner.prune import prune
from pagedweight.core.planner.score import Rows, ScoredActions
from pagedweight.core.size_table import IntArray


def greedy_select(context: PlanContext, scored: ScoredActions, target_bytes: int) -> Plan:
    """Pi_s: the shortest prefix of the order that returns `target_bytes`, then pruned.

    The order is damage per released byte; a row's steps keep their order. Depth caps are relaxed
    level by level only while the capped rows cannot provide the target. When all that is legal
    does not suffice, all of it is taken: the largest safe reduction.
    """
    rows, stage = scored.rows, scored.stage.name
    if target_bytes <= 0:
        return Plan.none(stage)
    low, slots = _lowest(context, scored, target_bytes)
    most = rows.held - int(context.pages.held(slots))
    after, need = low, most
    if most >= target_bytes:
        after, slots = _shortest_prefix(context, rows, low, target_bytes)
        need = target_bytes
    after, slots = prune(context, rows, after, slots, need)
    return Plan.between(context, rows, after, slots, stage, target_bytes)


def _lowest(context: PlanContext, scored: ScoredActions, target: int) -> tuple[Levels, IntArray]:
    """Lowest level index of each row under the tightest depth cap that suffices, and its slots."""
    cap = scored.stage.depth_cap
    if cap is not None:
        resting = context.levels_of(context.resting_bits)
        for depth in range(cap, context.steps):
            capped = np.maximum(scored.floor, resting - np.int8(depth))
            low: Levels = np.minimum(capped, scored.rows.now)
            slots = context.slots(low)
            if scored.rows.held - int(context.pages.held(slots)) >= target:
                return low, slots
    return scored.floor, context.slots(scored.floor)


def _shortest_prefix(
    context: PlanContext, rows: Rows, low: Levels, target: int
) -> tuple[Levels, IntArray]:
    """Level indices after the fewest steps of the order that return `target` bytes, and slots.

    Bytes used and pages held differ by `slack` at most, so the answer lies where the running bytes
    are within that of the target; only those steps are sorted and tried.
    """
    slack = context.pages.slack
    span = Span(target - slack, target + slack)
    legal = context.between(low, rows.now)
    found = cut(rows.keys, rows.bins, legal, context.delta, span, down=True)
    slots = context.slots(_lowered(rows.now, found, 0)) + _running_slots(context, found)
    enough = rows.held - context.pages.held(slots) >= target
    count = int(np.argmax(enough)) + 1  # all that is legal suffices, so some prefix does
    return _lowered(rows.now, found, count), slots[count - 1]


def _running_slots(context: PlanContext, found: Cut) -> IntArray:
    """Change of slots in every arena after each step of the edge, int64 [m, classes]."""
    classes = found.steps * len(KINDS) + found.rows % len(KINDS)
    out: IntArray = np.cumsum(context.step_slots[classes], axis=0)
    return out


def _lowered(now: Levels, found: Cut, count: int) -> Levels:
    """Level indices after the sure steps of a cut and the first `count` of its edge."""
    out: Levels = now - found.whole.view(np.int8).sum(0, dtype=np.int8)
    if count:
        extra = np.bincount(found.rows[:count], minlength=len(now))
        out -= extra.astype(np.int8)
    return out


def first_steps(context: PlanContext, rows: Rows, after: Levels, pages: int) -> Levels:
    """`after` held back to its first `pages` steps in the order (the pages-per-step cap)."""
    taken = context.between(after, rows.now)
    found = cut(rows.keys, rows.bins, taken, None, Span(pages, pages), down=True)
    return _lowered(rows.now, found, pages - int(np.count_nonzero(found.whole)))
