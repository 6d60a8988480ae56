"""The worker side of the runtime: one rank's memory, driven by the plans of the scheduler.

`apply` is called on entry to a step, before anything of it is launched: that is the safe boundary.
What the device or the pool refuses is rolled back, counted and reported; it never stops a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pagedweight.core.size_table import IntArray
from pagedweight.errors import Transient
from pagedweight.memory.kv_region import KVRegion
from pagedweight.runtime.messages import (
    Batch,
    RankPages,
    Signals,
    StepPlan,
    WorkerReport,
    check_version,
    mask_of,
)
from pagedweight.runtime.mover import Mover


class MemoryWorker:
    """Applies `StepPlan`s to a rank's weights and, when it has one, its KV region."""

    def __init__(
        self,
        mover: Mover,
        kv: KVRegion | None = None,
        pages_per_step: int | None = None,
        rank: int = 0,
        rows: IntArray | None = None,
    ) -> None:
        """pages_per_step: most pages that go back to the pool, and most that KV takes, in a step
        (on a GPU the driver needs tens of microseconds for each); None: no limit. rows: numbers in
        plans of this rank's rows, ascending or not (`Holding.rows`); None: plans number them so."""
        self.pages_per_step = pages_per_step
        self.rank = rank
        self.rows: IntArray | None = None
        self._local: dict[int, int] = {}
        if rows is not None:
            self.number_rows(rows)
        self.mover = mover
        self.kv = kv
        self.counters = mover.counters
        self._pool = mover.weights.pool
        self._step = 0
        self._most_granules: int | None = None  # to grow by at once, since that was refused

    def number_rows(self, rows: IntArray) -> None:
        """From now on plans call row n of this rank rows[n]."""
        self.rows = rows
        self._local = {row: n for n, row in enumerate(rows.tolist())}

    def apply(self, plan: StepPlan) -> None:
        """Do what `plan` says, in its order. A batch to prepare and commit at once is waited for.

        Waiting is in order on the device, so on CUDA it does not stop the host.
        """
        check_version(plan)
        self._step = plan.step
        mover, at_once = self.mover, {batch.number for batch in plan.prepare} & set(plan.commit)
        mover.poll()
        mover.forget(plan.oldest)
        mover.abort(plan.abort)
        self._shrink(plan.shrink)
        mover.commit(plan.commit)
        self._reclaim()
        for batch in plan.prepare:
            mover.prepare(self._own(batch))
            if batch.number in at_once:  # the next batch may need what this one gives back
                mover.settle({batch.number})
                mover.commit({batch.number})
                self._reclaim()
        self._grow(plan.grow)

    def report(self, signals: Signals | None = None) -> WorkerReport:
        """How things stand after the last plan, with the signals that the model gathered since."""
        returning = self.mover.weights.held_back + (self.kv.backing.held_back if self.kv else 0)
        return WorkerReport(
            step=self._step,
            batches=self.mover.statuses(),
            backed=mask_of(self.kv.backed) if self.kv else 0,
            pages=(RankPages(self.rank, self._pool.can_take(), returning, signals),),
            counters=self.counters.as_dict(),
        )

    def _own(self, batch: Batch) -> Batch:
        """What of a batch happens here, perhaps nothing; it is ready and committed all the same, so
        that it stands or falls with the other ranks'."""
        if self.rows is None:
            return batch
        own = [
            (self._local[row], bits)
            for row, bits in zip(batch.rows, batch.bits, strict=True)
            if row in self._local
        ]
        return replace(batch, rows=tuple(r for r, _ in own), bits=tuple(b for _, b in own))

    def _reclaim(self) -> None:
        most, before = self.pages_per_step, self._pool.free
        self.mover.compact(most)
        if self.kv:
            left = None if most is None else max(0, most - (self._pool.free - before))
            self._tried(partial(self.kv.reclaim, left))

    def _shrink(self, granules: Sequence[int]) -> None:
        if not self.kv:
            return
        gone = [g for g in granules if self.kv.is_backed(g)]
        if gone:
            self.counters.granules_shrunk += len(gone)
            self._tried(partial(self.kv.shrink, gone))

    def _grow(self, granules: Sequence[int]) -> None:
        if not self.kv:
            return
        fitting: list[int] = []
        most = self._pool.can_take()
        if self.pages_per_step is not None and self._step:
            most = min(most, max(self.pages_per_step, self.kv.most_pages))
        for granule in granules:
            if self.kv.is_backed(granule):
                continue
            if self.kv.pages_for([*fitting, granule]) > most:
                break
            fitting.append(granule)
        fitting = fitting[: self._most_granules]
        if not fitting:
            return
        if self._tried(partial(self.kv.grow, fitting)):
            self.counters.granules_grown += len(fitting)
            self._most_granules = None if self._most_granules is None else 2 * len(fitting)
        else:  # all or none: fewer may be had where so many are not
            self._most_granules = max(1, len(fitting) // 2)

    def _tried(self, call: Callable[[], object]) -> bool:
        """Whether `call` was not refused; a refusal leaves a sound state and is met again."""
        try:
            call()
        except Transient:
            self.counters.rolled_back += 1
            return False
        return True
