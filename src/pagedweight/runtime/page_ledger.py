"""The pages of every rank, as the scheduler knows them from reports and from what it promised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedweight.core.holdings import Holdings
from pagedweight.core.size_table import IntArray
from pagedweight.runtime.messages import RankPages, WorkerReport


class PageLedger:
    """A rank's own word counts for that rank; a holding has what its ranks all have.

    While nothing moves ranks do not exchange reports and their pages do not change: a report of one
    rank alone is then no news, and is not taken for all.
    """

    def __init__(self, holdings: Holdings, at_start: Sequence[int] = ()) -> None:
        """at_start: pages that ranks of each holding have free until heard of; empty: none."""
        self._holdings = holdings
        self._at_start = at_start or [0] * holdings.count
        self._pages: dict[int, RankPages] = {}
        self._promised: dict[int, IntArray] = {}
        self._wished: dict[int, IntArray] = {}

    @property
    def known(self) -> bool:
        """Whether every rank has been heard of."""
        return len(self._pages) == self._holdings.ranks

    @property
    def free(self) -> IntArray:
        """Pages free on all ranks of a holding, less what was promised, int64 [holdings]."""
        least = [min(pages.free for pages in ranks) for ranks in self._ranks()]
        out: IntArray = np.maximum(0, np.array(least, np.int64) - sum(self._promised.values()))
        return out

    @property
    def returning(self) -> IntArray:
        """Most pages that still go back to the pool on a rank of a holding, int64 [holdings]."""
        most = [max(pages.returning for pages in ranks) for ranks in self._ranks()]
        return np.array(most, np.int64)

    def _ranks(self) -> list[list[RankPages]]:
        """The pages of the ranks of each holding."""
        return [
            [self._pages.get(rank, RankPages(rank, free)) for rank in part.ranks]
            for part, free in zip(self._holdings.parts, self._at_start, strict=True)
        ]

    @property
    def unasked(self) -> IntArray:
        """`free`, less what KV was told to take since, int64 [holdings]."""
        out: IntArray = np.maximum(0, self.free - sum(self._wished.values()))
        return out

    def promise(self, step: int, pages: IntArray) -> None:
        """The plan of `step` lets rows take `pages` [holdings]."""
        self._promised[step] = pages

    def wish(self, step: int, pages: IntArray) -> None:
        """The plan of `step` lets KV take `pages` [holdings]; they are free until it has them."""
        self._wished[step] = pages

    def hear(self, report: WorkerReport) -> None:
        """A report of all ranks, in the order of steps."""
        if len(report.pages) == self._holdings.ranks:
            self._pages = {pages.rank: pages for pages in report.pages}
            for open_ in (self._promised, self._wished):
                for step in [step for step in open_ if step <= report.step]:
                    del open_[step]
