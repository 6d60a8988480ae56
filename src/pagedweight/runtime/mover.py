"""Pages in and out on one rank, batch by batch (paper 3.3; DESIGN decisions 4 to 7).

    lower   step s          the target's tables come in (beside)
            boundary        all there: q falls, one write; planes above q and old tables leave
            then            holes close, pages past the ends go once running steps have finished
    raise   step s          missing planes and tables come in (beside), into new slots
            boundary        all there: q rises, one write; old tables leave

A batch happens whole or not at all: what fails before its commit is rolled back and reported. Every
method is called at a safe boundary, between two steps, by the thread that submits them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pagedweight.core.page_table import Mask, WeightPageTable
from pagedweight.core.size_table import IntArray
from pagedweight.errors import Transient
from pagedweight.memory.interface import Completion
from pagedweight.runtime.messages import Batch, BatchStatus, Stage
from pagedweight.runtime.weights import Arrival, WeightMemory


@dataclass
class _Flight:
    """A batch on its way. `epochs` are those of its latest `begin_*` in the page table; rows and
    bits the batch's, as arrays."""

    batch: Batch
    rows: IntArray
    bits: IntArray
    stage: Stage = Stage.FAILED
    reason: str = ""
    epochs: IntArray | int = 0
    arrival: Arrival | None = None
    fence: Completion | None = None


class Mover:
    """Owns a rank's page table; `weights` holds the memory."""

    def __init__(self, weights: WeightMemory, table: WeightPageTable) -> None:
        """`table` says what `weights` has loaded."""
        self.weights = weights
        self.table = table
        self.counters = weights.counters
        self._flights: dict[int, _Flight] = {}

    def statuses(self) -> tuple[BatchStatus, ...]:
        """Stage of every batch that is not forgotten."""
        return tuple(BatchStatus(n, f.stage, f.reason) for n, f in sorted(self._flights.items()))

    def forget(self, oldest: int) -> None:
        """Batches with numbers below `oldest` that came to an end are not reported any more."""
        over = (Stage.DONE, Stage.FAILED)
        self._flights = {
            n: f for n, f in self._flights.items() if n >= oldest or f.stage not in over
        }

    @property
    def busy_rows(self) -> set[int]:
        """Rows of batches that have not come to an end."""
        flying = (Stage.COPYING, Stage.READY, Stage.COMMITTED)
        return {row for f in self._flights.values() if f.stage in flying for row in f.batch.rows}

    def pieces_in(self, stage: Stage) -> set[int]:
        """Pieces that batches in `stage` brought in."""
        flights = [f for f in self._flights.values() if f.stage is stage and f.arrival]
        return {int(number) for f in flights for number in f.arrival.pieces}  # type: ignore[union-attr]

    # -- before the commit -----------------------------------------------------------------------

    def prepare(self, batch: Batch) -> None:
        """Start the copies that `batch` needs; one that cannot start has failed."""
        if batch.number in self._flights:
            return
        rows, bits = np.array(batch.rows, np.int64), np.array(batch.bits, np.int64)
        flight = self._flights[batch.number] = _Flight(batch, rows, bits)
        refusal = self._refusal(flight)
        if refusal:
            flight.reason = refusal
            return
        begin = self.table.begin_lower if batch.lowers else self.table.begin_reload
        flight.epochs = begin(rows, bits)
        try:
            pieces = self.weights.missing(rows, bits)
            flight.arrival = self.weights.bring_in(pieces, urgent=batch.lowers)
        except Transient as error:
            self._roll_back(flight, str(error))
            return
        flight.stage = Stage.COPYING

    def _refusal(self, flight: _Flight) -> str:
        """Why the batch may not start, in words; empty when it may."""
        batch = flight.batch
        busy = self.busy_rows.intersection(batch.rows)
        can = self.table.can_lower if batch.lowers else self.table.can_reload
        if not busy and can(flight.rows, flight.bits).all():
            return ""
        way = "lowered" if batch.lowers else "raised"
        return f"rows that are busy or cannot be {way}, of {len(batch.rows)}: {sorted(busy)[:8]}"

    def poll(self) -> None:
        """Take note of copies that are over."""
        self._guarded(self.weights.sweep_strays)
        for flight in self._flights.values():
            if flight.stage is Stage.COPYING:
                self._poll(flight)

    def _poll(self, flight: _Flight) -> None:
        assert flight.arrival is not None
        try:
            if flight.arrival.copied.done():
                self._arrived(flight)
        except Transient as error:
            self._broke_off(flight, error)

    def settle(self, numbers: Iterable[int]) -> None:
        """In order: what comes next starts after the copies of these batches; they are READY."""
        for number in numbers:
            flight = self._flights.get(number)
            if flight is None or flight.stage is not Stage.COPYING:
                continue
            assert flight.arrival is not None
            try:
                self.weights.device.after(flight.arrival.copied)
            except Transient as error:
                self._broke_off(flight, error)
            else:
                self._arrived(flight)

    def _arrived(self, flight: _Flight) -> None:
        assert flight.arrival is not None
        self.weights.landed(flight.arrival)
        self.counters.uploaded_bytes += flight.arrival.nbytes
        if not flight.batch.lowers:
            self._must(self.table.finish_reload(flight.rows, flight.epochs))
        flight.stage = Stage.READY

    def _broke_off(self, flight: _Flight, error: Transient) -> None:
        assert flight.arrival is not None
        self.weights.landed(flight.arrival)
        self._guarded(partial(self.weights.drop, flight.arrival.pieces))
        self._roll_back(flight, str(error))

    def abort(self, numbers: Iterable[int]) -> None:
        """Give up batches that are not committed; late copies will find nobody waiting."""
        for number in numbers:
            flight = self._flights.get(number)
            if flight is None or flight.stage not in (Stage.COPYING, Stage.READY):
                continue
            assert flight.arrival is not None
            if flight.stage is Stage.COPYING:
                self.weights.abandon(flight.arrival)
            else:
                self._guarded(partial(self.weights.drop, flight.arrival.pieces))
            self.counters.aborted_batches += 1
            self._undo_table(flight)
            flight.stage, flight.reason = Stage.FAILED, "aborted"

    def _roll_back(self, flight: _Flight, reason: str) -> None:
        self.counters.rolled_back += 1
        self._undo_table(flight)
        flight.stage, flight.reason = Stage.FAILED, reason

    def _undo_table(self, flight: _Flight) -> None:
        rows, epochs, table = flight.rows, flight.epochs, self.table
        if flight.batch.lowers:
            self._must(table.abort_lower(rows, epochs))
        elif flight.stage is Stage.READY:  # the planes are there, and read by nobody
            self._must(table.finish_retire(rows, table.begin_retire(rows)))
            table.set_desired(rows, table.committed_bits[rows])
        else:
            self._must(table.abort_reload(rows, epochs))

    # -- the commit and after --------------------------------------------------------------------

    def commit(self, numbers: Iterable[int]) -> None:
        """Change bits of those batches that are READY, all by one write.

        When the write is refused nothing has changed, and they stay READY for a later call.
        """
        ready = [
            flight
            for number in numbers
            if (flight := self._flights.get(number)) and flight.stage is Stage.READY
        ]
        changing = [flight for flight in ready if len(flight.rows)]  # some have none on this rank
        try:
            if changing:
                rows = np.concatenate([flight.rows for flight in changing])
                self.weights.commit(rows, np.concatenate([flight.bits for flight in changing]))
        except Transient:
            self.counters.rolled_back += 1
            return
        for flight in ready:
            self._committed(flight)

    def _committed(self, flight: _Flight) -> None:
        rows, bits = flight.rows, flight.bits
        if flight.batch.lowers:
            self._must(self.table.lower(rows, flight.epochs))
            self.counters.rows_lowered += len(rows)
        else:
            self.table.raise_bits(rows, bits)
            self.counters.rows_raised += len(rows)
        flight.epochs = self.table.begin_retire(rows)
        leaving = self.weights.surplus(rows, bits)
        self._guarded(partial(self.weights.drop, leaving))
        flight.fence = self.weights.device.fence()
        flight.stage = Stage.COMMITTED

    def compact(self, most: int | None = None) -> None:
        """Close holes, let pages past the ends go, take back those that nothing can read now, at
        most `most`."""
        self._guarded(self.weights.compact)
        self.weights.release()
        self.reclaim(most)

    def reclaim(self, most: int | None = None) -> None:
        """Finish what only waited for running steps."""
        self._guarded(partial(self.weights.reclaim, most))
        for flight in self._flights.values():
            if flight.stage is Stage.COMMITTED and flight.fence and flight.fence.done():
                self._must(self.table.finish_retire(flight.rows, flight.epochs))
                flight.stage = Stage.DONE

    def _guarded(self, call: Callable[[], object]) -> None:
        """Run what leaves a sound state when it fails and is tried again at the next boundary."""
        try:
            call()
        except Transient:
            self.counters.rolled_back += 1

    @staticmethod
    def _must(current: Mask) -> None:
        """The page table knew every row's epoch: nobody else moves rows of a rank."""
        if not current.all():
            raise AssertionError("a completion of this rank met a stale epoch")
