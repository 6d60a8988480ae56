"""The scheduler process's half: controller, parking, what is recorded and what is shown."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.holdings import Holdings
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import PlanContext, Planner, PlanQueue
from pagedweight.core.planner.holdings import HoldingsPlanner
from pagedweight.runtime.controller import BlockDemand, Controller, KVShape
from pagedweight.runtime.dispatch import DispatchConfig
from pagedweight.runtime.granules import GranuleLedger
from pagedweight.runtime.messages import StepPlan, WorkerReport
from pagedweight.runtime.signals import SignalWindow
from pagedweight.runtime.trace import BitTrace
from pagedweight.serving.elastic.backend import on_gpu
from pagedweight.serving.elastic.budget import (
    KVBlock,
    divide_all,
    fixed_bits,
    plan_context,
)
from pagedweight.serving.elastic.dealing import Dealing, Parallel
from pagedweight.serving.elastic.parking import ParkedBlocks
from pagedweight.serving.elastic.record import Recorder, header_of, sinks_of
from pagedweight.serving.elastic.tracing import Replay, TracingPlanner, trace_folder
from pagedweight.serving.options import ServeOptions

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


GPU_ROWS_PER_BATCH = 512


AnyPlanner = Planner | TracingPlanner | HoldingsPlanner


def _planner(
    contexts: tuple[PlanContext, ...], holdings: Holdings, options: ServeOptions
) -> AnyPlanner:
    if holdings.count > 1:
        return HoldingsPlanner(contexts, holdings)
    planner = Planner(contexts[0])
    if options.trace is None:
        return planner
    return TracingPlanner(planner, trace_folder(options.trace))


def dispatch_config(ranks: int, reserve: int) -> DispatchConfig:
    """On a GPU memory comes back when running steps have finished, so nothing is done at once, and
    batches are as large as the reserve lets them be."""
    if on_gpu():
        return DispatchConfig(
            rows_per_batch=GPU_ROWS_PER_BATCH, eager=ranks == 1, lowering_pages=reserve
        )
    return DispatchConfig(at_once=ranks == 1, lowering_pages=reserve)


class Control:
    """One for the engine. `plan` before every step, `hear` with every report."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: ServeOptions,
        block: KVBlock,
        pool: BlockPool,
        parallel: Parallel,
        block_tokens: int,
        engine: int = 0,
    ) -> None:
        """`block`: as the ranks of one holding have it. `engine`: number of this engine among
        data-parallel ones, for what is recorded.

        budgets: of each holding; of blocks and granules all have equally many.
        """
        self.context = context = plan_context(checkpoint, options, parallel.cuts)
        dealing = Dealing.of(checkpoint, parallel)
        self.holdings = holdings = dealing.holdings
        self.contexts = dealing.contexts(context)
        self.options = options
        fixed = dealing.rows_of(fixed_bits(checkpoint, options))
        self.budgets = divide_all(self.contexts, options, dealing.blocks(block), fixed)
        bits = np.empty(context.index.rows, np.int32)
        for rows, own in zip(holdings.rows, self.budgets, strict=True):
            bits[rows] = own.bits
        budget = self.budgets[0]
        usable = range(budget.usable_granules)
        self.parking = ParkedBlocks(pool, budget.granule_blocks, usable)
        self.planner = _planner(self.contexts, holdings, options)
        self.controller = Controller(
            WeightPageTable(context.index, context.sizes, bits),
            self.planner,
            context.policy,
            GranuleLedger(len(pool.blocks), budget.granule_blocks, usable),
            [KVShape(own.block.nbytes, own.granule_pages) for own in self.budgets],
            budget.page_bytes,
            SignalWindow(context.calibration, checkpoint.top_k, context.policy.prior_tokens),
            dispatch_config(holdings.ranks, budget.reserve),
            holdings,
            [own.free_pages for own in self.budgets],
        )
        self.preemptions = 0
        self._model_steps = 0
        self._replay = (
            None if options.replay is None else Replay(BitTrace.load(options.replay), bits)
        )
        header = header_of(self, checkpoint, block_tokens, engine, time.time())
        self.recorder = Recorder(self, sinks_of(header, options.timeline))

    def plan(self, demand: BlockDemand, running: int, waiting: int) -> StepPlan | None:
        """The plan for the step that is scheduled next; None when precision is frozen."""
        self.recorder.begin(demand, running, waiting)
        if self._replay is not None:
            return self._replay.plan(self._model_steps + 1)
        if self.options.still:
            return None
        plan = self.controller.step(demand, self.parking)
        if plan.commit:
            self._bits_change()
        return plan

    def scheduled(self, tokens: int) -> None:
        """vLLM has scheduled `tokens` tokens for the step."""
        self._model_steps += tokens > 0
        self.recorder.scheduled(tokens)

    def hear(self, report: WorkerReport) -> None:
        """A report of the ranks came back."""
        if self._replay is not None:
            self._replay.check(report)
        before = self.controller.table.committed_bits.copy()
        self.controller.hear(report, self.parking)
        if (before != self.controller.table.committed_bits).any():
            self._bits_change()

    def wants_step(self, demand: BlockDemand) -> bool:
        """Whether steps must go on although no request wants them: something is under way."""
        if self._replay is not None or self.options.still:
            return False
        return self.controller.wants_step(demand)

    @property
    def queues(self) -> list[PlanQueue]:
        """What the planner remembers, for each holding."""
        planner = self.planner
        return planner.queues if isinstance(planner, HoldingsPlanner) else [planner.queue]

    def _bits_change(self) -> None:
        if self.options.prefix_policy == "reset":
            self.parking.forget_prefixes()

    def close(self) -> None:
        """The engine ends."""
        self.recorder.close()
        if isinstance(self.planner, TracingPlanner):
            self.planner.close()
