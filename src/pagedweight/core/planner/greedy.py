"""GreedySelect: cheapest steps first until whole pages meet the target (Algorithm 1 line 7)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pagedweight.core.geometry import KINDS
from pagedweight.core.planner.context import Levels, PlanContext
from pagedweight.core.planner.order import Cut, Order, Span, cut
from pagedweight.core.planner.plan import Plan
from pagedweight.core.planner.prune import prune
from pagedweight.core.planner.score import ScoredActions
from pagedweight.core.size_table import IntArray


def greedy_select(context: PlanContext, scored: ScoredActions, target_bytes: int) -> Plan:
    """Pi_s: the shortest prefix of the order that returns `target_bytes`, then pruned.

    The order is damage per released byte; a row's steps keep their order. Depth caps are relaxed
    level by level only while the capped rows cannot provide the target. When all that is legal
    does not suffice, all of it is taken: the largest safe reduction; a stage's `least` bytes stay.
    A plan of more pages than the policy's cap is held back to the first of its steps.
    """
    rows, stage, least = scored.rows, scored.stage.name, scored.stage.least
    if target_bytes <= 0:
        return Plan.none(stage)
    given = min(target_bytes, rows.held - (context.level_bytes[least] if least else 0))
    if given <= 0:
        return replace(Plan.none(stage), target_bytes=target_bytes)
    low, slots = _lowest(context, scored, given)
    most = rows.held - int(context.pages.held(slots))
    after, need = low, most
    if most >= given:
        after, slots = _shortest_prefix(context, scored, low, given)
        need = given
    if given < target_bytes:
        most = min(most, given)
    cap = context.policy.offload_pages_per_step
    if int((rows.now - after).sum(dtype=np.int64)) > cap:
        after = first_steps(context, scored.order, rows.now, after, cap)
        slots = context.slots(after)
    else:
        after, slots = prune(context, rows, after, slots, need)
    plan = Plan.between(context, rows, after, slots, stage, target_bytes)
    return replace(plan, stage_bytes=max(most, 0))


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
    context: PlanContext, scored: ScoredActions, low: Levels, target: int
) -> tuple[Levels, IntArray]:
    """Level indices after the fewest steps of the order that return `target` bytes, and slots.

    Bytes used and pages held differ by `slack` at most, so the answer lies where the running bytes
    are within that of the target; only those steps are sorted and tried.
    """
    rows, slack = scored.rows, context.pages.slack
    legal = context.between(low, rows.now)
    span = Span(target - slack, target + slack)
    found = cut(scored.order, legal, context.delta, span, down=True)
    sure = _lowered(rows.now, found, 0)
    slots = context.slots(sure) + _running_slots(context, found)
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
        np.subtract.at(out, found.rows[:count], np.int8(1))
    return out


def first_steps(
    context: PlanContext, order: Order, now: Levels, after: Levels, pages: int
) -> Levels:
    """`after` held back to its first `pages` steps in the order (the pages-per-step cap)."""
    taken = context.between(after, now)
    found = cut(order, taken, None, Span(pages, pages), down=True)
    return _lowered(now, found, pages - int(np.count_nonzero(found.whole)))
