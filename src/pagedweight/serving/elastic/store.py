"""The worker process's expert store when precision may change: arenas over one page pool."""

from __future__ import annotations

import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.errors import UserError
from pagedweight.kernels.contract import Activation, BlockTable, LayerStats
from pagedweight.memory.host import HostDevice
from pagedweight.memory.host_tier import CheckpointTier
from pagedweight.memory.kv_region import Granule, KVRegion
from pagedweight.runtime.messages import StepPlan
from pagedweight.runtime.startup import open_rank
from pagedweight.runtime.worker import MemoryWorker
from pagedweight.serving.elastic.budget import (
    Budget,
    KVBlock,
    divide,
    fixed_bits,
    plan_context,
)
from pagedweight.serving.kernel import get_kernel
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.parts import Part
from pagedweight.serving.state import LayerState


class ElasticStore:
    """One rank's experts and KV in one budget.

    Layers register while vLLM builds the model (`load`); once it knows its KV blocks, `start`
    divides the budget and brings the weights in; `back_kv` gives vLLM its KV memory.
    """

    def __init__(self, checkpoint: Checkpoint, options: ServeOptions) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.states: dict[int, LayerState] = {}
        self.part: Part | None = None
        self._budget: Budget | None = None
        self._worker: MemoryWorker | None = None

    def load(
        self, decoder_layer: int, part: Part, activation: Activation, device: torch.device
    ) -> LayerState:
        """Register a layer; its table is filled by `start`."""
        if device.type != "cpu":
            raise UserError(f"--memory is for the CPU backend so far, not for {device.type}")
        if len(part.experts) != self.checkpoint.shape.experts:
            raise UserError("--memory does not work with expert parallelism yet")
        self.part = self.part or part
        if part != self.part:
            raise AssertionError(f"layers of one rank have parts {self.part} and {part}")
        shape = part.shape(self.checkpoint.shape)
        state = LayerState(
            kernel=get_kernel(device.type),
            shape=shape,
            table=BlockTable.empty(shape.experts, "cpu"),
            table_dtype=getattr(torch, self.checkpoint.table_dtype),
            activation=activation,
            stats=LayerStats.empty(shape.experts, "cpu"),
        )
        self.states[self.checkpoint.position(decoder_layer)] = state
        return state

    @property
    def worker(self) -> MemoryWorker:
        """The rank's memory, after `start`."""
        assert self._worker is not None
        return self._worker

    @property
    def budget(self) -> Budget:
        """How the memory is divided, after `start`."""
        assert self._budget is not None
        return self._budget

    def start(self, block: KVBlock) -> None:
        """Divide the budget and load the initial plan."""
        assert self.part is not None
        assert self.options.memory is not None
        if len(self.states) != len(self.checkpoint.moe_layers):
            raise UserError(
                f"--memory does not work with pipeline parallelism: this rank has "
                f"{len(self.states)} of {len(self.checkpoint.moe_layers)} MoE layers"
            )
        context = plan_context(self.checkpoint, self.options, self.part.ranks)
        fixed = fixed_bits(self.checkpoint, self.options)
        budget = divide(context, self.options, block, fixed)
        tier = CheckpointTier(self.checkpoint, self.part.experts, self.part.rank, self.part.ranks)
        device = HostDevice(budget.page_bytes)
        options = self.options
        self._worker = open_rank(
            device,
            tier,
            budget.bits,
            budget.pages * budget.page_bytes,
            poison=options.poison,
            reserve=budget.reserve,
        )
        self._budget = budget
        for position, state in self.states.items():
            state.table = self._worker.mover.weights.tables[position]

    def back_kv(self, nbytes: int, granules: list[Granule]) -> torch.Tensor:
        """int8 [nbytes] for vLLM's KV cache, with the granules of the start backed."""
        weights = self.worker.mover.weights
        poison = self.options.poison
        self.worker.kv = KVRegion(weights.device, weights.pool, nbytes, granules, poison=poison)
        self.worker.apply(StepPlan(0, grow=tuple(range(self.budget.usable_granules))))
        return self.worker.kv.tensor()

    def forget_signals(self) -> None:
        """Start statistics again: warm-up runs routed nothing real."""
        for state in self.states.values():
            assert state.stats is not None
            for sums in (state.stats.mass, state.stats.tokens, state.stats.features):
                sums.zero_()
