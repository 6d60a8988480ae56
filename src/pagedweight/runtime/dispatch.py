"""The scheduler side of moving rows: desired bits become batches, answers become committed bits.

Rows whose desired bits differ from the committed ones are sent off in batches. A batch is committed
on all ranks in one plan once it is ready on all of them; one that fails anywhere is given up
everywhere, its rows keep their bits, and the next attempt is smaller and a little later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pagedweight.core.holdings import Holdings
from pagedweight.core.page_table import BitsArray, Moving, WeightPageTable
from pagedweight.core.size_class import SizeClassPages
from pagedweight.core.size_table import IntArray
from pagedweight.runtime.messages import Batch, BatchStatus, Stage
from pagedweight.runtime.room import Room


@dataclass(frozen=True)
class DispatchConfig:
    """rows_per_batch: most rows in one batch. hold_off_steps: steps before trying again after a
    batch failed. at_once: lower in one plan, waiting in order for the tables; for one rank whose
    memory comes back at once (the host backend). eager: a lowering batch may be committed as soon
    as its rank is ready, without waiting for another plan; for one rank.
    lowering_pages: the pool's reserve, which the tables of a lowering batch must fit in (with what
    is free besides); None: no limit."""

    rows_per_batch: int = 256
    hold_off_steps: int = 8
    at_once: bool = False
    eager: bool = False
    lowering_pages: int | None = None


@dataclass
class _Open:
    """A batch that has not come to an end: `stage` is the least of all ranks'. rows, bits: the
    batch's, as arrays."""

    batch: Batch
    rows: IntArray
    bits: BitsArray
    epochs: IntArray
    stage: Stage = Stage.COPYING
    commit_sent: bool = False


class Dispatcher:
    """Keeps the scheduler's page table in step with the ranks'."""

    def __init__(
        self,
        table: WeightPageTable,
        pages: SizeClassPages,
        config: DispatchConfig,
        holdings: Holdings | None = None,
    ) -> None:
        """`holdings` None: all ranks hold all rows."""
        self.table = table
        self._holdings = holdings or Holdings.one(table.index)
        self._config = config
        self._open: dict[int, _Open] = {}
        self._given_up: list[int] = []
        self._next = 1
        self._room = Room(table, pages, self._holdings)
        self._limit = {True: config.rows_per_batch, False: config.rows_per_batch}
        self._not_before = {True: 0, False: 0}
        self.failures = 0
        self.last_failure = ""

    @property
    def under_way(self) -> int:
        """Batches that have not come to an end."""
        return len(self._open)

    @property
    def oldest(self) -> int:
        """Smallest number that is still of interest."""
        return min([*self._open, *self._given_up, self._next])

    # -- answers ---------------------------------------------------------------------------------

    def hear(self, statuses: Sequence[BatchStatus], step: int) -> None:
        """Take note of what holds on all ranks."""
        for status in statuses:
            open_ = self._open.get(status.number)
            if open_ is None:
                continue
            if status.stage is Stage.FAILED:
                self._failed(open_, status.reason, step)
                continue
            if open_.stage < Stage.READY <= status.stage and not open_.batch.lowers:
                self.table.finish_reload(open_.rows, open_.epochs)
            if open_.stage < Stage.COMMITTED <= status.stage:
                self._committed(open_)
            if status.stage is Stage.DONE:
                self.table.finish_retire(open_.rows, open_.epochs)
                del self._open[status.number]
            open_.stage = max(open_.stage, status.stage)

    def _committed(self, open_: _Open) -> None:
        rows, bits, table = open_.rows, open_.bits, self.table
        if open_.batch.lowers:
            table.lower(rows, open_.epochs)
        else:
            table.raise_bits(rows, bits)
        open_.epochs = table.begin_retire(rows)
        most = self._config.rows_per_batch
        lowers = open_.batch.lowers
        self._limit[lowers] = min(most, self._limit[lowers] * 2)

    def _failed(self, open_: _Open, reason: str, step: int) -> None:
        lowers, tried = open_.batch.lowers, len(open_.batch.rows)
        self.failures += 1
        self.last_failure = reason
        self._limit[lowers] = max(1, min(self._limit[lowers], tried // 2))
        self._not_before[lowers] = step + self._config.hold_off_steps
        self._give_up(open_)

    def _give_up(self, open_: _Open) -> None:
        rows, epochs, table = open_.rows, open_.epochs, self.table
        if open_.batch.lowers:
            table.abort_lower(rows, epochs)
        elif open_.stage is Stage.READY:
            table.finish_retire(rows, table.begin_retire(rows))
            table.set_desired(rows, table.committed_bits[rows])
        else:
            table.abort_reload(rows, epochs)
        del self._open[open_.batch.number]
        self._given_up.append(open_.batch.number)

    # -- orders ----------------------------------------------------------------------------------

    def stay(self) -> None:
        """Rows that only wait to be raised are content with the bits they have."""
        rows = self._waiting(lowers=False)
        if len(rows):
            self.table.set_desired(rows, self.table.committed_bits[rows])

    def aborts(self) -> tuple[int, ...]:
        """Batches that the ranks must give up: failed somewhere, or raising what is to stay low."""
        desired = self.table.desired_bits
        for open_ in list(self._open.values()):
            if open_.batch.lowers or open_.commit_sent:
                continue
            kept = desired[open_.rows]
            if (kept < open_.bits).any():
                self._give_up(open_)
                self.table.set_desired(open_.rows, kept)
        numbers = tuple(self._given_up)
        self._given_up.clear()
        return numbers

    def commits(self) -> tuple[int, ...]:
        """Batches that are ready on all ranks, repeated until they are committed on all; when
        eager, lowering ones that only copy too: the rank commits them once they are ready."""
        ready = [
            number
            for number, open_ in self._open.items()
            if open_.stage is Stage.READY
            or (self._config.eager and open_.batch.lowers and open_.stage is Stage.COPYING)
        ]
        for number in ready:
            self._open[number].commit_sent = True
        return tuple(ready)

    def lowers(self, step: int, free_pages: IntArray | int = 0) -> tuple[Batch, ...]:
        """Batches for rows that should be lower and are free to move; `free_pages` [holdings].

        A batch's tables come in before its planes leave, so each fits in the reserve and what is
        free. At once, one batch after another uses what the one before gave back, and all rows go;
        else the next batch waits for that.
        """
        rows, most = self._waiting(lowers=True), self._limit[True]
        if step < self._not_before[True] or not len(rows):
            return ()
        if self._config.lowering_pages is None:
            return self._batches(rows, True, step)
        room, batches = self._room, []
        pages, slots = self._config.lowering_pages + free_pages, room.slots()
        while len(rows):
            picked, after = room.fitting_to_lower(rows[:most], slots, pages)
            batches.append(self._open_batch(picked, True))
            pages = pages + room.held(slots) - room.held(after)
            rows, slots = rows[~np.isin(rows, picked)], after
            if not self._config.at_once:
                break
        return tuple(batches)

    def raises(self, step: int, pages: IntArray) -> tuple[tuple[Batch, ...], IntArray, IntArray]:
        """Batches of rows that should be higher, for at most `pages` [holdings]; the pages that
        they take; and, when none may go, those that they lack."""
        rows, none = self._waiting(lowers=False), np.zeros_like(pages)
        if not len(rows):
            return (), none, none
        room = self._room
        fitting = room.fitting_to_raise(rows, pages)
        taken = room.to_raise(fitting)
        batches = self._batches(fitting, False, step)
        if batches:
            return batches, taken, none
        return (), none, np.maximum(room.to_raise(rows) - pages, 0)

    def _waiting(self, lowers: bool) -> IntArray:
        table = self.table
        away = table.desired_bits < table.committed_bits
        if not lowers:
            away = table.desired_bits > table.committed_bits
        if not away.any():
            return np.empty(0, np.int64)
        free = (table.moving == Moving.NONE) & (table.goal_bits == table.committed_bits)
        return self._holdings.dealt(np.flatnonzero(away & free).astype(np.int64))

    def _batches(self, rows: IntArray, lowers: bool, step: int) -> tuple[Batch, ...]:
        if step < self._not_before[lowers] or not len(rows):
            return ()
        size = self._limit[lowers]
        held_off = size < self._config.rows_per_batch
        parts = np.array_split(rows, -(-len(rows) // size))
        return tuple(self._open_batch(part, lowers) for part in (parts[:1] if held_off else parts))

    def _open_batch(self, rows: IntArray, lowers: bool) -> Batch:
        bits = self.table.desired_bits[rows]
        batch = Batch(self._next, lowers, tuple(rows.tolist()), tuple(bits.tolist()))
        self._next += 1
        epochs = self._begin(lowers)(rows, bits)
        at_once = lowers and self._config.at_once
        self._open[batch.number] = _Open(batch, rows, bits, epochs, commit_sent=at_once)
        return batch

    def _begin(self, lowers: bool) -> Callable[[IntArray, BitsArray], IntArray]:
        return self.table.begin_lower if lowers else self.table.begin_reload
