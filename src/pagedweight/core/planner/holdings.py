"""One plan for ranks that hold different rows: each holding has a target of its own.

KV has as many blocks on every rank, and each rank makes room for its part of a block by itself. So
a number of granules is a target D (eq. 7) for each holding, in the bytes of its own blocks less its
own headroom, and the least damage under all targets is the least damage of each: Algorithm 1 runs
on every holding, and the plan is all of them together.

KV grows by what the least able holding can give; the others are not asked for more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagedweight.core.holdings import Holdings
from pagedweight.core.observation import BatchSignals, KVPressure, Observation
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner.context import PlanContext, TableState
from pagedweight.core.planner.plan import Plan
from pagedweight.core.planner.queue import PlanQueue
from pagedweight.core.planner.step import plan_step
from pagedweight.core.planner.target import wanted_blocks
from pagedweight.core.size_table import IntArray

Answer = tuple[PlanQueue, Plan]


class HoldingsPlanner:
    """A `Planner` whose observations have `holdings`; `contexts` and `queues` are theirs."""

    def __init__(self, contexts: Sequence[PlanContext], holdings: Holdings) -> None:
        self.contexts = tuple(contexts)
        self.holdings = holdings
        self.queues = [PlanQueue() for _ in contexts]
        self._signals: tuple[BatchSignals | None, list[BatchSignals | None]]
        self._signals = (None, [None] * len(self.contexts))

    def step(self, table: WeightPageTable, observation: Observation) -> Plan:
        """Plan one step from `table`; the caller applies the plan."""
        counts = self.holdings.counts(table)
        states = [
            TableState(table.desired_bits[rows], slots)
            for rows, slots in zip(self._rows, counts, strict=True)
        ]
        signals = self._parts(observation.signals)
        seen = [
            Observation(observation.step, kv, of)
            for kv, of in zip(observation.holdings, signals, strict=True)
        ]
        answers = [
            plan_step(*each) for each in zip(states, seen, self.contexts, self.queues, strict=True)
        ]
        reached = [
            _granules(context, one.kv, *answer)
            for context, one, answer in zip(self.contexts, seen, answers, strict=True)
        ]
        for n, (context, one) in enumerate(zip(self.contexts, seen, strict=True)):
            if reached[n] > min(reached):
                less = replace(one, kv=_at_most(one.kv, min(reached)))
                answers[n] = plan_step(states[n], less, context, self.queues[n])
        self.queues = [queue for queue, _ in answers]
        return Plan.joined([plan for _, plan in answers], self._rows)

    @property
    def _rows(self) -> tuple[IntArray, ...]:
        return self.holdings.rows

    def _parts(self, signals: BatchSignals | None) -> list[BatchSignals | None]:
        """Of each holding; the same objects while `signals` is the same."""
        if signals is None:
            return [None] * len(self.contexts)
        if self._signals[0] is not signals:
            pairs = zip(self.holdings.parts, self._rows, strict=True)
            self._signals = (signals, [signals.of(part, rows) for part, rows in pairs])
        return self._signals[1]


def _granules(context: PlanContext, kv: KVPressure, queue: PlanQueue, plan: Plan) -> int:
    """Granules that KV can grow by on the ranks of a holding once its plan is carried out: those
    that the plan was made for, less what it cannot give."""
    urgent = plan.stage in queue.emergency
    threshold = 0 if urgent else context.policy.offload_blocks
    expected = kv.free_blocks - kv.growth_blocks - kv.head_blocks
    wanted = wanted_blocks(kv, threshold, expected if urgent else kv.expected_free_blocks)
    lacking = max(0, plan.target_bytes - plan.stage_bytes) if plan.kind != "reload" else 0
    granule_bytes = kv.granule_blocks * kv.block_bytes
    return -(-wanted // kv.granule_blocks) - -(-lacking // granule_bytes)


def _at_most(kv: KVPressure, granules: int) -> KVPressure:
    """As if no more than so many granules could be backed at all."""
    total = min(kv.total_blocks, kv.usable_blocks + 1 + granules * kv.granule_blocks)
    return replace(kv, total_blocks=total)
