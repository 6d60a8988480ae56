"""The scheduler process's half: controller, parking, what is recorded and what is shown."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import PlanContext, Planner
from pagedweight.runtime.controller import BlockDemand, Controller, KVShape
from pagedweight.runtime.dispatch import DispatchConfig
from pagedweight.runtime.granules import GranuleLedger
from pagedweight.runtime.messages import StepPlan, WorkerReport
from pagedweight.runtime.signals import SignalWindow
from pagedweight.runtime.trace import BitTrace
from pagedweight.serving.elastic.backend import on_gpu
from pagedweight.serving.elastic.budget import (
    Budget,
    KVBlock,
    divide,
    fixed_bits,
    plan_context,
)
from pagedweight.serving.elastic.parking import ParkedBlocks
from pagedweight.serving.elastic.record import Recorder, header_of, sinks_of
from pagedweight.serving.elastic.tracing import Replay, TracingPlanner, trace_folder
from pagedweight.serving.options import ServeOptions

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


GPU_ROWS_PER_BATCH = 512


def _planner(context: PlanContext, options: ServeOptions) -> Planner | TracingPlanner:
    planner = Planner(context)
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
        ranks: int,
        block_tokens: int,
        engine: int = 0,
    ) -> None:
        """`engine`: number of this engine among data-parallel ones, for what is recorded."""
        self.context = context = plan_context(checkpoint, options, ranks)
        self.options = options
        self.ranks = ranks
        self.budget: Budget = divide(context, options, block, fixed_bits(checkpoint, options))
        usable = range(self.budget.usable_granules)
        self.parking = ParkedBlocks(pool, self.budget.granule_blocks, usable)
        self.planner = _planner(context, options)
        self.controller = Controller(
            WeightPageTable(context.index, context.sizes, self.budget.bits),
            self.planner,
            context.policy,
            GranuleLedger(len(pool.blocks), self.budget.granule_blocks, usable),
            KVShape(block.nbytes, self.budget.granule_pages),
            self.budget.page_bytes,
            SignalWindow(context.calibration, checkpoint.top_k, context.policy.prior_tokens),
            dispatch_config(ranks, self.budget.reserve),
        )
        self.preemptions = 0
        self._model_steps = 0
        self._replay = (
            None
            if options.replay is None
            else Replay(BitTrace.load(options.replay), self.budget.bits)
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

    def _bits_change(self) -> None:
        if self.options.prefix_policy == "reset":
            self.parking.forget_prefixes()

    def close(self) -> None:
        """The engine ends."""
        self.recorder.close()
        if isinstance(self.planner, TracingPlanner):
            self.planner.close()
