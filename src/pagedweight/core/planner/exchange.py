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
from pagedweight.core.planner.restore import restore_plan
from pagedweight.core.planner.score import Rows

STAGE = "exchange"
Step = tuple[float, int, int]
"""(damage per byte, bytes, row) of one step of one row."""


def exchange_plan(context: PlanContext, rows: Rows) -> Plan:
    """The lowering half, empty when no exchange is worth it.

    Rises in order of damage recovered per byte are paid for by falls in order of damage done per
    byte, while the first is at least `exchange_ratio` times the second; a row moves one level, and
    at most `reload_pages_per_step` rise. Falls keep to the tightest floors that all rows are at.

    Pages are whole, so what comes back may be less than was lowered for: the other half is planned
    too, and where it would not recover `exchange_ratio` times the damage, half as many rise.
    """
    rises = _paid_rises(context, rows)
    while rises:
        plan = _lowering(context, rows, [row for paid in rises for row in paid])
        after = rows.now.copy()
        after[plan.rows] = context.levels_of(plan.to_bits)
        back = restore_plan(context, Rows.of(context, rows.damage, after), plan.returned_bytes)
        if -back.damage >= context.policy.exchange_ratio * plan.damage:
            return plan
        rises = rises[: len(rises) // 2]
    return Plan.none(STAGE)


def _paid_rises(context: PlanContext, rows: Rows) -> list[list[int]]:
    """For each rise that is worth it, best first, the rows that fall for it."""
    ratio, most = context.policy.exchange_ratio, context.policy.reload_pages_per_step
    rises = _steps(context, rows, rows.now, rows.now < context.steps, best=True)
    falls = _steps(context, rows, rows.now - 1, rows.now > _floor(context, rows), best=False)
    paid: list[list[int]] = []
    moved: set[int] = set()
    released = wanted = 0
    for gain, size, row in rises:
        wanted += size
        mine: list[int] = []
        while released < wanted and (fall := next(falls, None)) is not None:
            harm, given, other = fall
            if harm * ratio > gain or other == row:
                return paid
            mine.append(other)
            released += given
        if released < wanted or row in moved or len(paid) == most:
            return paid
        moved |= {row, *mine}
        paid.append(mine)
    return paid


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
