"""Whole pages held while single rows rise one level: integer arithmetic on the arenas touched."""

from __future__ import annotations

import numpy as np

from pagedweight.core.geometry import KINDS
from pagedweight.core.planner.context import PlanContext
from pagedweight.core.size_table import IntArray


class Ledger:
    """Slots of every arena and the bytes of whole pages behind them, one row at a time.

    A class here is step * kinds + kind: a row of that kind between level index step and the next.
    """

    def __init__(self, context: PlanContext, slots: IntArray) -> None:
        self._slots: list[int] = slots.tolist()
        self._slot_bytes: list[int] = context.pages.slot_bytes.tolist()
        self._page = context.pages.page_bytes
        self._touched = [
            _arenas(of, context.pages.levels) for of in range(context.steps * len(KINDS))
        ]

    @property
    def slots(self) -> IntArray:
        """Slots in every arena now, int64 [classes]."""
        return np.array(self._slots, np.int64)

    def cost_of_rise(self, of: int) -> int:
        """Bytes of whole pages that it takes to raise one more row of class `of`."""
        cost = 0
        for arena, gained in self._touched[of]:
            slots, size = self._slots[arena], self._slot_bytes[arena]
            cost += -(-(slots + gained) * size // self._page) + (-slots * size // self._page)
        return cost * self._page

    def rise(self, of: int, rows: int = 1) -> None:
        """Raise `rows` rows of class `of`; -1 takes one back down."""
        for arena, gained in self._touched[of]:
            self._slots[arena] += gained * rows


def _arenas(of: int, levels: int) -> tuple[tuple[int, int], ...]:
    """(arena, slots gained) when a row of class `of` rises: a plane, and one table for another."""
    step, kind = divmod(of, len(KINDS))
    table = len(KINDS) + kind * levels + step
    return (kind, 1), (table, -1), (table + 1, 1)
