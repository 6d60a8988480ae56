"""Which rows each rank holds: how expert and pipeline parallelism deal linear blocks out.

    rows of the model   [layer 0: experts 0 .. E-1][layer 1: ...] ...
    expert parallel     every layer, some of the experts       a holding for each rank
    pipeline parallel   some of the layers, every expert       a holding for each stage
    tensor parallel     all rows, a part of each               one holding that all ranks share

A holding is a rectangle, layers x experts. Holdings do not overlap and leave nothing out, so that
what a plan costs or returns on the ranks of one says nothing about another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.size_class import SlotCounts
from pagedweight.core.size_table import BlockIndex, IntArray


@dataclass(frozen=True)
class Holding:
    """layers: positions among the MoE layers; experts: ids, in the order of local ids; ranks: those
    that hold them, each a part of every row when there are several."""

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    ranks: tuple[int, ...] = (0,)

    @property
    def index(self) -> BlockIndex:
        """Names the rows as their ranks number them."""
        return BlockIndex(len(self.layers), len(self.experts))

    def rows(self, whole: BlockIndex) -> IntArray:
        """Rows of the model in the order of the holding's own, int64 [rows here]."""
        numbers = np.arange(whole.rows).reshape(whole.shape)
        out: IntArray = numbers[np.ix_(self.layers, self.experts)].ravel()
        return out


class Holdings:
    """All holdings of a model of `index`.

    of_row: int64 [rows], number of the holding of each row.
    rows:   of each holding, int64 [rows there].
    """

    def __init__(self, index: BlockIndex, parts: Sequence[Holding]) -> None:
        """Raises ValueError when a row or a rank has no holding or several."""
        self.index = index
        self.parts = tuple(parts)
        self.rows = tuple(part.rows(index) for part in parts)
        every = np.sort(np.concatenate(self.rows))
        ranks = sorted(rank for part in parts for rank in part.ranks)
        if not np.array_equal(every, np.arange(index.rows)) or ranks != list(range(len(ranks))):
            raise ValueError(f"holdings overlap or leave something out: {self.parts}")
        self.of_row: IntArray = np.empty(index.rows, np.int64)
        for number, rows in enumerate(self.rows):
            self.of_row[rows] = number
        self._counted: tuple[int, tuple[SlotCounts, ...]] | None = None

    @staticmethod
    def one(index: BlockIndex, ranks: int = 1) -> Holdings:
        """Every rank holds all rows (or a part of each)."""
        layers, experts, _ = index.shape
        whole = Holding(tuple(range(layers)), tuple(range(experts)), tuple(range(ranks)))
        return Holdings(index, [whole])

    @property
    def count(self) -> int:
        return len(self.parts)

    @property
    def ranks(self) -> int:
        return sum(len(part.ranks) for part in self.parts)

    def of_rank(self, rank: int) -> int:
        """Number of the holding that a rank has."""
        return next(n for n, part in enumerate(self.parts) if rank in part.ranks)

    def counts(self, table: WeightPageTable) -> tuple[SlotCounts, ...]:
        """Device slots taken in each holding's arenas."""
        if self.count == 1:
            return (table.slots(),)
        if self._counted is None or self._counted[0] != table.version:
            counts = tuple(table.taken_slots(rows) for rows in self.rows)
            self._counted = (table.version, counts)
        return self._counted[1]

    def slots(self, table: WeightPageTable) -> IntArray:
        """The same, int64 [holdings, classes]."""
        return np.stack([counts.flat() for counts in self.counts(table)])

    def dealt(self, rows: IntArray) -> IntArray:
        """`rows` in an order in which every stretch has some of each holding."""
        if self.count == 1:
            return rows
        of = self.of_row[rows]
        place = np.empty(len(rows), np.int64)
        for number in range(self.count):
            mine = np.flatnonzero(of == number)
            place[mine] = np.arange(len(mine))
        out: IntArray = rows[np.lexsort((of, place))]
        return out
