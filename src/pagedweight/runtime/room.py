"""Pages that moving rows take and give back, in the arenas of each holding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.geometry import KINDS
from pagedweight.core.holdings import Holdings
from pagedweight.core.page_table import BitsArray, WeightPageTable
from pagedweight.core.size_class import SizeClassPages
from pagedweight.core.size_table import IntArray


class Room:
    """Arithmetic on slots [holdings, classes] and pages [holdings]; rows go to their desired bits,
    as many as fit: each holding takes the first of its own."""

    def __init__(self, table: WeightPageTable, pages: SizeClassPages, holdings: Holdings) -> None:
        self._table = table
        self._pages = pages
        self._holdings = holdings

    def slots(self) -> IntArray:
        """Taken now."""
        return self._holdings.slots(self._table)

    def held(self, slots: IntArray) -> IntArray:
        """Pages behind `slots`."""
        out: IntArray = self._pages.held(slots) // self._pages.page_bytes
        return out

    def to_raise(self, rows: IntArray) -> IntArray:
        """Pages that the arenas grow by when `rows` begin to come in."""
        now = self.slots()
        return self.held(now + self._tables(rows, coming=True) + self._planes(rows)) - self.held(
            now
        )

    def fitting_to_raise(self, rows: IntArray, pages: IntArray) -> IntArray:
        """Those of `rows` that can be raised within `pages`, none perhaps. Asked at every step in
        which rows wait, mostly in vain: all numbers of rows are looked at together, and only when
        one row fits."""
        of, keep = self._holdings.of_row[rows], np.zeros(len(rows), np.bool_)
        for holding, now in enumerate(self.slots()):
            mine = np.flatnonzero(of == holding)
            for several in (mine[:1], mine):
                gains = np.cumsum(self._gains(rows[several]), axis=0)
                need = self.held(now + gains) - self.held(now)
                fitting = int(np.searchsorted(need, pages[holding], side="right"))
                if not fitting:
                    break
            keep[mine[:fitting]] = True
        return rows[keep]

    def _gains(self, rows: IntArray) -> IntArray:
        """Slots that each row takes while it comes in, int64 [rows, classes]."""
        old, new = self._table.committed_bits[rows], self._table.desired_bits[rows]
        gains, at = (
            np.zeros((len(rows), len(self._pages.slot_bytes)), np.int64),
            np.arange(len(rows)),
        )
        gains[at, rows % len(KINDS)] = new - old
        gains[at, self._class_of_table(rows, new)] = 1
        return gains

    def fitting_to_lower(
        self, rows: IntArray, slots: IntArray, pages: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Those of `rows`, one at least, whose tables fit in `pages` beside `slots`, by halves; and
        the slots once they are lower."""
        while True:
            coming = slots + self._tables(rows, coming=True)
            over = self.held(coming) - self.held(slots) > pages
            fewer = self._halved(rows, over) if over.any() else rows
            if len(fewer) == len(rows):
                return rows, coming - self._tables(rows, coming=False) + self._planes(rows)
            rows = fewer

    def _halved(self, rows: IntArray, over: NDArray[np.bool_]) -> IntArray:
        """`rows` with only the first half, one at least, of those of holdings that are `over`."""
        of, keep = self._holdings.of_row[rows], np.ones(len(rows), np.bool_)
        for holding in np.flatnonzero(over):
            mine = np.flatnonzero(of == holding)
            keep[mine[max(1, len(mine) // 2) :]] = False
        return rows[keep]

    def _tables(self, rows: IntArray, coming: bool) -> IntArray:
        """Lookup tables that `rows` bring in, or those that they leave behind."""
        bits = (self._table.desired_bits if coming else self._table.committed_bits)[rows]
        return self._count(rows, self._class_of_table(rows, bits))

    def _class_of_table(self, rows: IntArray, bits: BitsArray) -> IntArray:
        """The class (`SizeClassPages`) that the lookup tables of `rows` at `bits` are in."""
        kinds, sizes = len(KINDS), self._table.sizes
        return kinds + rows % kinds * len(sizes.levels) + bits - sizes.lowest

    def _planes(self, rows: IntArray) -> IntArray:
        """Planes that `rows` gain; negative when they lose some."""
        gained = self._table.desired_bits[rows] - self._table.committed_bits[rows]
        return self._count(rows, rows % len(KINDS), gained)

    def _count(
        self, rows: IntArray, of: IntArray, many: NDArray[np.int32] | None = None
    ) -> IntArray:
        """Slots [holdings, classes]: one, or `many`, for each row in class `of`."""
        classes, holdings = len(self._pages.slot_bytes), self._holdings.count
        at = self._holdings.of_row[rows] * classes + of
        counted = np.bincount(at, many, minlength=holdings * classes)
        out: IntArray = counted.astype(np.int64).reshape(holdings, classes)
        return out
