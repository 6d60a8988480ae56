"""Undo the steps that a plan does not need: the last step overshoots, pages are whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagedweight.core.geometry import KINDS
from pagedweight.core.planner.context import Levels, PlanContext
from pagedweight.core.planner.ledger import Ledger
from pagedweight.core.planner.score import Rows
from pagedweight.core.residual import Float32
from pagedweight.core.size_table import IntArray

HEADS = 32
"""Candidates of a class sorted at first; few are ever undone."""


def prune(
    context: PlanContext, rows: Rows, after: Levels, slots: IntArray, target: int
) -> tuple[Levels, IntArray]:
    """Level indices and slots with unneeded deepest steps undone, most damaging first.

    A step that would leave less than `target` bytes of whole pages closes its size class (kind and
    level) for this pass; passes end when one undoes nothing. Equal damage: the lower row first.
    """
    spare = rows.held - int(context.pages.held(slots)) - target
    ledger = Ledger(context, slots)
    classes = range(context.steps * len(KINDS))
    while fitting := [of for of in classes if ledger.cost_of_rise(of) <= spare]:
        spare, undone, after = _undo(rows, after, ledger, fitting, spare)
        if not undone:
            break
    return after, ledger.slots


def _undo(
    rows: Rows, after: Levels, ledger: Ledger, fitting: list[int], spare: int
) -> tuple[int, int, Levels]:
    """One pass over every row's deepest step: bytes still to spare, steps undone, level indices."""
    queues = {of: _deepest(rows, after, of) for of in fitting}
    heads = {of: head for of in fitting if (head := next(queues[of], None)) is not None}
    out, undone = after.copy(), 0
    while heads:
        of = min(heads, key=heads.__getitem__)
        cost = ledger.cost_of_rise(of)
        if cost > spare:
            del heads[of]
            continue
        ledger.rise(of)
        spare -= cost
        undone += 1
        out[heads.pop(of)[1]] += 1
        if (head := next(queues[of], None)) is not None:
            heads[of] = head
    return spare, undone, out


def _deepest(rows: Rows, after: Levels, of: int) -> Iterator[tuple[float, int]]:
    """(-damage, row) of the rows whose deepest step is of this class, most damaging first."""
    step, kind = divmod(of, len(KINDS))
    part = slice(kind, None, len(KINDS))
    here = np.flatnonzero((after[part] == step) & (rows.now[part] > step)) * len(KINDS) + kind
    damage = rows.damage.predicted[step, here]
    if len(here) <= HEADS:
        yield from _sorted(damage, here)
        return
    top = damage >= np.partition(damage, -HEADS)[-HEADS]
    yield from _sorted(damage[top], here[top])
    yield from _sorted(damage[~top], here[~top])


def _sorted(damage: Float32, rows: IntArray) -> Iterator[tuple[float, int]]:
    order = np.lexsort((rows, -damage))
    yield from zip((-damage[order]).tolist(), rows[order].tolist(), strict=True)
