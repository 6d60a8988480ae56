"""Exchange: bits change places when signals do and the load does not.

Without pressure and without bytes to spare nothing would ever move, and bits would stay where an
older text wanted them. An exchange lowers rows that now do little harm, in one plan, and the bytes
they release come back as restored planes in a later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pagedweight.core.planner.context import Levels, PlanContext
from pagedweight.core.planner.order import Mask
from pagedweight.core.planner.plan import Plan
from pagedweight.core.planner.score import Rows

STAGE = "exchange"
Step = tuple[float, int, int]
"""(damage per byte, bytes, row) of one step of one row."""


def exchange_plan(context: PlanContext, rows: Rows) -> Plan:
    """The lowering half, empty when no exchange is worth it.

    Rises in order of damage recovered per byte are paid for by falls in order of damage done per
    byte, while the first is at least `exchange_ratio` times the second; a row moves one level, and
    at most `reload_pages_per_step` rise. Falls keep to the tightest floors that all rows are at.
    """
    ratio, most = context.policy.exchange_ratio, context.policy.reload_pages_per_step
    rises = _steps(context, rows, rows.now, rows.now < context.steps, best=True)
    falls = _steps(context, rows, rows.now - 1, rows.now > _floor(context, rows), best=False)
    lowered: list[int] = []
    released = wanted = 0
    worst = 0.0
    moved: set[int] = set()
    for taken, (gain, size, row) in enumerate(rises):
        if taken == most or row in moved:
            break
        wanted += size
        mine: list[int] = []
        for harm, given, other in falls if released < wanted else ():
            if harm * ratio > gain or other == row:
                break
            mine.append(other)
            released, worst = released + given, harm
            if released >= wanted:
                break
        if released < wanted or worst * ratio > gain:
            break
        lowered += mine
        moved |= {row, *mine}
    return _lowering(context, rows, lowered)


def _lowering(context: PlanContext, rows: Rows, lowered: list[int]) -> Plan:
    after = rows.now.copy()
    after[lowered] -= 1
    plan = Plan.between(context, rows, after, context.slots(after), STAGE, 0)
    return replace(plan, target_bytes=max(plan.returned_bytes, 0))


def _floor(context: PlanContext, rows: Rows) -> Levels:
    """Lowest level of each row under the tightest stage that nothing lies below."""
    for stage in context.stages:
        floor: Levels = stage.floors.take(rows.damage.bucket)
        if (rows.now >= floor).all():
            break
    return floor


def _steps(
    context: PlanContext, rows: Rows, step: Levels, legal: Mask, best: bool
) -> Iterator[Step]:
    """One step of each legal row: the most damage per byte first (`best`), or the least."""
    index = np.flatnonzero(legal)
    at = step[index].astype(np.int64)
    per_byte = rows.damage.per_byte[at, index]
    order = np.lexsort((index, -per_byte if best else per_byte))
    sizes = context.delta[at, index].astype(np.int64)
    yield from zip(
        per_byte[order].tolist(), sizes[order].tolist(), index[order].tolist(), strict=True
    )
