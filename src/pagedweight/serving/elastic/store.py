"""The worker process's expert store when precision may change: arenas over one page pool."""

from __future__ import annotations

import numpy as np
import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.holdings import Holding
from pagedweight.errors import UserError
from pagedweight.kernels.contract import Activation, BlockTable, LayerStats
from pagedweight.memory.host_tier import CheckpointTier
from pagedweight.memory.kv_region import Granule, KVRegion
from pagedweight.runtime.messages import Signals, StepPlan
from pagedweight.runtime.signals import RankStats, take_signals
from pagedweight.runtime.startup import open_rank
from pagedweight.runtime.worker import MemoryWorker
from pagedweight.serving.elastic.backend import open_device, open_host_tier, pages_per_step
from pagedweight.serving.elastic.budget import (
    Budget,
    KVBlock,
    divide_all,
    fixed_bits,
    plan_context,
)
from pagedweight.serving.elastic.dealing import Dealing, Parallel
from pagedweight.serving.kernel import get_kernel
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.parts import Part
from pagedweight.serving.state import LayerState


class ElasticStore:
    """One rank's experts and KV in one budget.

    Layers register while vLLM builds the model (`load`); once it knows its KV blocks, `start`
    divides the budget and brings the weights in; `back_kv` gives vLLM its KV memory.
    states: by position among the MoE layers, from `start` on among those of this rank.
    """

    def __init__(self, checkpoint: Checkpoint, options: ServeOptions) -> None:
        self.checkpoint = checkpoint
        self.options = options
        self.states: dict[int, LayerState] = {}
        self.part: Part | None = None
        self.where = torch.device("cpu")
        self.sends_signals = True
        self._rank_stats: RankStats | None = None
        self._num_tokens: torch.Tensor | None = None
        self._budget: Budget | None = None
        self._worker: MemoryWorker | None = None

    def load(
        self, decoder_layer: int, part: Part, activation: Activation, device: torch.device
    ) -> LayerState:
        """Register a layer; its table is filled by `start`."""
        self.part, self.where = self.part or part, device
        if part != self.part:
            raise AssertionError(f"layers of one rank have parts {self.part} and {part}")
        shape = part.shape(self.checkpoint.shape)
        state = LayerState(
            kernel=get_kernel(device.type),
            shape=shape,
            table=BlockTable.empty(shape.experts, device),
            table_dtype=getattr(torch, self.checkpoint.table_dtype),
            activation=activation,
            stats=LayerStats.empty(shape.experts, device),
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

    def start(self, block: KVBlock, parallel: Parallel, rank: int) -> None:
        """Divide the budget and load the initial plan; `block`: as this `rank` of vLLM's has it."""
        assert self.part is not None
        options, dealing = self.options, Dealing.of(self.checkpoint, parallel)
        mine = dealing.holdings.of_rank(rank)
        holding, blocks = dealing.holdings.parts[mine], dealing.blocks(block)
        self._compare(holding, parallel, block, blocks[mine])
        contexts = dealing.contexts(plan_context(self.checkpoint, options, parallel.cuts))
        fixed = dealing.rows_of(fixed_bits(self.checkpoint, options))
        budget = divide_all(contexts, options, blocks, fixed)[mine]
        part = self.part
        tier = CheckpointTier(self.checkpoint, part.experts, part.rank, part.ranks, holding.layers)
        device = open_device(budget.page_bytes, self.where)
        self._worker = open_rank(
            device,
            open_host_tier(tier, device, options),
            budget.bits,
            budget.pages * budget.page_bytes,
            self.where,
            poison=options.poison,
            reserve=budget.reserve,
            pages_per_step=pages_per_step(),
            rank=rank,
            rows=dealing.holdings.rows[mine] if dealing.holdings.count > 1 else None,
        )
        self.sends_signals = holding.ranks[0] == rank
        self._budget = budget
        self.states = {n: self.states[position] for n, position in enumerate(holding.layers)}
        for layer, state in self.states.items():
            state.table = self._worker.mover.weights.tables[layer]
        if self.where.type == "cuda":
            self._count_on_gpu(tier.index.layers, tier.index.experts)

    def _compare(
        self, holding: Holding, parallel: Parallel, block: KVBlock, expected: KVBlock
    ) -> None:
        """UserError when vLLM dealt out something else than the scheduler counts on."""
        assert self.part is not None
        has = (sorted(self.states), self.part.experts, self.part.ranks, block)
        counted = (list(holding.layers), holding.experts, parallel.cuts, expected)
        if has != counted:
            raise UserError(
                "--memory cannot follow how vLLM dealt this model out: a rank has MoE layers, "
                f"experts, cuts and KV blocks {has}, and {counted} were expected; serve it with "
                "--bits or --plan"
            )

    def _count_on_gpu(self, layers: int, experts: int) -> None:
        """One buffer for the statistics of all layers, and how many tokens of a step are real."""
        self._rank_stats = RankStats(layers, experts, self.where)
        self._num_tokens = torch.zeros(1, dtype=torch.int64, device=self.where)
        for layer, state in self.states.items():
            state.stats = self._rank_stats.layers[layer]
            state.num_tokens = self._num_tokens

    def begin_step(self, tokens: int) -> None:
        """The next step has so many real tokens; a graph's padding behind them is not counted."""
        if self._num_tokens is not None:
            device = self.worker.mover.weights.device
            device.write(self._num_tokens.data_ptr(), np.array([tokens]).view(np.uint8))

    def take_signals(self) -> Signals | None:
        """Signals since the last call, or those of an earlier step; None when there are none, or
        another rank with the same rows sends them."""
        if not self.sends_signals:
            return None
        if self._rank_stats is not None:
            return self._rank_stats.take()
        return take_signals([s.stats for s in self.states.values() if s.stats is not None])

    def back_kv(self, nbytes: int, granules: list[Granule]) -> torch.Tensor:
        """int8 [nbytes] for vLLM's KV cache, with the granules of the start backed."""
        weights = self.worker.mover.weights
        poison = self.options.poison
        self.worker.kv = KVRegion(weights.device, weights.pool, nbytes, granules, poison=poison)
        self.worker.apply(StepPlan(0, grow=tuple(range(self.budget.usable_granules))))
        return self.worker.kv.tensor()

    def forget_signals(self) -> None:
        """Start statistics again: warm-up runs routed nothing real."""
        if self._rank_stats is not None:
            self._rank_stats.forget()
            return
        for state in self.states.values():
            assert state.stats is not None
            for sums in (state.stats.mass, state.stats.tokens, state.stats.features):
                sums.zero_()
