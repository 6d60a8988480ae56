"""The scheduler process's half: controller, parking, what is recorded and what is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import Planner
from pagedweight.runtime.controller import BlockDemand, Controller, KVShape
from pagedweight.runtime.dispatch import DispatchConfig
from pagedweight.runtime.granules import GranuleLedger
from pagedweight.runtime.messages import StepPlan, WorkerReport
from pagedweight.runtime.signals import SignalWindow
from pagedweight.serving.elastic.budget import (
    Budget,
    KVBlock,
    divide,
    fixed_bits,
    plan_context,
)
from pagedweight.serving.elastic.parking import ParkedBlocks
from pagedweight.serving.options import ServeOptions

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool


class Control:
    """One for the engine. `plan` before every step, `hear` with every report."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: ServeOptions,
        block: KVBlock,
        pool: BlockPool,
        ranks: int,
    ) -> None:
        context = plan_context(checkpoint, options, ranks)
        self.options = options
        self.budget: Budget = divide(context, options, block, fixed_bits(checkpoint, options))
        usable = range(self.budget.usable_granules)
        self.parking = ParkedBlocks(pool, self.budget.granule_blocks, usable)
        self.controller = Controller(
            WeightPageTable(context.index, context.sizes, self.budget.bits),
            Planner(context),
            context.policy,
            GranuleLedger(len(pool.blocks), self.budget.granule_blocks, usable),
            KVShape(block.nbytes, self.budget.granule_pages),
            self.budget.page_bytes,
            SignalWindow(context.calibration, checkpoint.top_k, context.policy.prior_tokens),
            DispatchConfig(at_once=ranks == 1),
        )
        self.preemptions = 0

    def plan(self, demand: BlockDemand, running: int, waiting: int) -> StepPlan | None:
        """The plan for the step that is scheduled next; None when precision is frozen."""
        if self.options.still:
            return None
        plan = self.controller.step(demand, self.parking)
        if plan.commit:
            self._bits_change()
        return plan

    def scheduled(self, tokens: int) -> None:
        """vLLM has scheduled `tokens` tokens for the step."""

    def hear(self, report: WorkerReport) -> None:
        """A report of the ranks came back."""
        before = self.controller.table.committed_bits.copy()
        self.controller.hear(report, self.parking)
        if (before != self.controller.table.committed_bits).any():
            self._bits_change()

    def wants_step(self, demand: BlockDemand) -> bool:
        """Whether steps must go on although no request wants them: something is under way."""
        return not self.options.still and self.controller.wants_step(demand)

    def _bits_change(self) -> None:
        if self.options.prefix_policy == "reset":
            self.parking.forget_prefixes()

    def close(self) -> None:
        """The engine ends."""
