"""Restore: bits come back in the order of damage recovered per byte, within the bytes to spare."""

from __future__ import annotations

from collections.abc import Iterator

from pagedweight.core.geometry import KINDS
from pagedweight.core.planner.context import Levels, PlanContext
from pagedweight.core.planner.ledger import Ledger
from pagedweight.core.planner.order import Mask, Span, cut
from pagedweight.core.planner.plan import Plan
from pagedweight.core.planner.score import Rows, restore_order
from pagedweight.core.size_table import IntArray

STAGE = "restore"


def restore_plan(context: PlanContext, rows: Rows, spare: int) -> Plan:
    """Upward steps, best first, that take at most `spare` bytes of whole pages.

    At most `reload_pages_per_step` of them. A step that does not fit closes its size class (kind
    and level) for this plan; smaller ones behind it may still fit.
    """
    if spare <= 0 or int(rows.now.min()) == context.steps:
        return Plan.none(STAGE, spare)
    after, slots = _take(context, rows, spare, context.policy.reload_pages_per_step)
    return Plan.between(context, rows, after, slots, STAGE, spare)


def _take(context: PlanContext, rows: Rows, spare: int, cap: int) -> tuple[Levels, IntArray]:
    """Level indices after at most `cap` upward steps, and slots."""
    kinds = len(KINDS)
    ledger = Ledger(context, rows.slots)
    classes = range(context.steps * kinds)
    fitting = {of for of in classes if ledger.cost_of_rise(of) <= spare}
    legal = context.between(rows.now, None)
    for of in set(classes) - fitting:
        legal[of // kinds, of % kinds :: kinds] = False
    out, taken = rows.now.copy(), 0
    for step, row in _in_order(rows, legal, 2 * cap):
        of = step * kinds + row % kinds
        if of not in fitting or out[row] != step:
            continue
        cost = ledger.cost_of_rise(of)
        if cost > spare:
            fitting.discard(of)
            continue
        ledger.rise(of)
        spare -= cost
        out[row] += 1
        taken += 1
        if taken == cap or not fitting:
            break
    return out, ledger.slots


def _in_order(rows: Rows, legal: Mask, chunk: int) -> Iterator[tuple[int, int]]:
    """(step, row) of every legal upward step, most damage recovered per byte first.

    Sorted about `chunk` at a time, because few are taken.
    """
    order = restore_order(rows.damage, rows.now)
    while True:
        found = cut(order, legal, None, Span(0, chunk), down=False)
        if not found.rows.size:
            return
        yield from zip(found.steps.tolist(), found.rows.tolist(), strict=True)
        legal[found.steps, found.rows] = False
