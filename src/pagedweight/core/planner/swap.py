"""Exact-ish improvement of a static assignment: one row rises on the bytes that another gives."""

from __future__ import annotations

import numpy as np

from pagedweight.core.geometry import KINDS
from pagedweight.core.planner.context import Levels, PlanContext
from pagedweight.core.planner.ledger import Ledger

Move = tuple[float, int, int]
"""(damage, class, row) of the best row of a class to rise or fall one level."""


def improve(context: PlanContext, levels: Levels, ledger: Ledger, spare: int, floor: int) -> None:
    """Swap and fill, in place, until no rise (alone or paid for by one fall) lowers damage.

    Damage falls strictly with every move, so it ends; the best move of all is taken each time.
    """
    damage = context.global_damage.astype(np.float64)
    while True:
        rises = _best(damage, levels, up=True, limit=context.steps)
        falls = _best(damage, levels, up=False, limit=floor)
        found = _best_pair(ledger, rises, falls, spare)
        if found is None:
            return
        (_, up, risen), fall, cost = found
        if fall is not None:
            ledger.rise(fall[1], -1)
            levels[fall[2]] -= 1
        ledger.rise(up)
        levels[risen] += 1
        spare -= cost


def _best(
    damage: np.ndarray[tuple[int, ...], np.dtype[np.float64]], levels: Levels, up: bool, limit: int
) -> list[Move]:
    """For every class, the row that recovers most by rising or harms least by falling."""
    kinds, out = len(KINDS), []
    for step in range(len(damage)):
        for kind in range(kinds):
            part = slice(kind, None, kinds)
            here = levels[part] == (step if up else step + 1)
            if (not up and step < limit) or not here.any():
                continue
            rows = np.flatnonzero(here) * kinds + kind
            harm = damage[step, rows]
            at = int(np.argmax(harm) if up else np.argmin(harm))
            out.append((float(harm[at]), step * kinds + kind, int(rows[at])))
    return out


def _best_pair(
    ledger: Ledger, rises: list[Move], falls: list[Move], spare: int
) -> tuple[Move, Move | None, int] | None:
    """The rise and the fall that pays for it (None: it fits by itself) with most damage saved."""
    best, saved = None, 0.0
    for fall in [None, *falls]:
        given = 0
        if fall is not None:
            ledger.rise(fall[1], -1)
            given = ledger.cost_of_rise(fall[1])
        for rise in rises:
            harm = 0.0 if fall is None else fall[0]
            same = fall is not None and fall[2] == rise[2]
            if same or rise[0] - harm <= saved:
                continue
            cost = ledger.cost_of_rise(rise[1]) - given
            if cost <= spare:
                best, saved = (rise, fall, cost), rise[0] - harm
        if fall is not None:
            ledger.rise(fall[1])
    return best
