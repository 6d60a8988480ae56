"""How vLLM deals experts and layers out to its ranks, worked out from the flags alone.

    rank = stage * tensor parallel size + place in the stage
    expert parallel:    the first E mod n ranks of a stage hold one expert more, in order
    pipeline parallel:  vLLM's own split of the decoder layers

Launcher, scheduler and workers compute it alike, and a worker compares it with what vLLM gave it.
Tested with vLLM 0.26 and 0.32. Relies on: get_pp_indices, ParallelConfig.{tensor_parallel_size,
pipeline_parallel_size, enable_expert_parallel}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.holdings import Holding, Holdings
from pagedweight.core.planner import PlanContext
from pagedweight.core.size_table import BlockIndex
from pagedweight.errors import UserError
from pagedweight.serving.conflicts import has, number
from pagedweight.serving.elastic.budget import KVBlock


@dataclass(frozen=True)
class Parallel:
    """tensor: ranks of a stage; pipeline: stages; experts: whether experts are dealt out to the
    ranks of a stage, not cut."""

    tensor: int = 1
    pipeline: int = 1
    experts: bool = False

    @staticmethod
    def of_arguments(arguments: Sequence[str]) -> Parallel:
        """What vLLM's command line asks for."""
        return Parallel(
            number(arguments, "--tensor-parallel-size", "-tp"),
            number(arguments, "--pipeline-parallel-size", "-pp"),
            has(arguments, "--enable-expert-parallel"),
        )

    @staticmethod
    def of_config(config: Any) -> Parallel:
        """What a ParallelConfig says."""
        return Parallel(
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            config.enable_expert_parallel,
        )

    @property
    def cuts(self) -> int:
        """Parts that an expert's width is cut into."""
        return 1 if self.experts else self.tensor


@dataclass(frozen=True)
class Dealing:
    """holdings: rows of each rank; depths: decoder layers of each holding."""

    parallel: Parallel
    holdings: Holdings
    depths: tuple[int, ...]

    @staticmethod
    def of(checkpoint: Checkpoint, parallel: Parallel) -> Dealing:
        """UserError when a rank would be left without experts."""
        index = BlockIndex(len(checkpoint.moe_layers), checkpoint.shape.experts)
        parts: list[Holding] = []
        depths: list[int] = []
        for stage, decoders in enumerate(_stages(checkpoint, parallel.pipeline)):
            layers = [n for n, layer in enumerate(checkpoint.moe_layers) if layer in decoders]
            if not layers:
                raise UserError(
                    f"stage {stage} of {parallel.pipeline} (decoder layers {decoders.start} to "
                    f"{decoders.stop - 1}) has no experts: --memory needs some on every rank; use "
                    "fewer stages or VLLM_PP_LAYER_PARTITION"
                )
            first = stage * parallel.tensor
            for experts, ranks in _dealt(index.experts, parallel, first):
                parts.append(Holding(tuple(layers), experts, ranks))
                depths.append(len(decoders))
        return Dealing(parallel, Holdings(index, parts), tuple(depths))

    def contexts(self, whole: PlanContext) -> tuple[PlanContext, ...]:
        """The planner's inputs of each holding."""
        if self.holdings.count == 1:
            return (whole,)
        return tuple(whole.of_holding(part) for part in self.holdings.parts)

    def blocks(self, block: KVBlock) -> tuple[KVBlock, ...]:
        """A KV block on the ranks of each holding; `block`: on those of any one."""
        if self.parallel.pipeline == 1:
            return (block,) * self.holdings.count
        return tuple(KVBlock(depth, block.layer_bytes) for depth in self.depths)

    def rows_of(self, values: NDArray[np.int32] | None) -> list[NDArray[np.int32] | None]:
        """Per-row `values` of the model, those of each holding."""
        return [None if values is None else values[rows] for rows in self.holdings.rows]


def _stages(checkpoint: Checkpoint, stages: int) -> list[range]:
    """Decoder layers of each pipeline stage."""
    layers = checkpoint.manifest.num_hidden_layers
    if stages == 1:
        return [range(layers)]
    if stages > layers:
        raise UserError(f"{layers} layers cannot be dealt out to {stages} pipeline stages")
    from vllm.distributed.utils import get_pp_indices

    try:
        return [range(*get_pp_indices(layers, stage, stages)) for stage in range(stages)]
    except ValueError as error:
        raise UserError(f"VLLM_PP_LAYER_PARTITION: {error}") from error


def _dealt(
    experts: int, parallel: Parallel, first: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(experts, ranks) of the holdings of the stage whose ranks begin at `first`."""
    size = parallel.tensor
    if not parallel.experts or size == 1:
        return [(tuple(range(experts)), tuple(range(first, first + size)))]
    if experts < size:
        raise UserError(f"{experts} experts cannot be dealt out to {size} ranks")
    each, more = divmod(experts, size)
    starts = [n * each + min(n, more) for n in range(size + 1)]
    return [(tuple(range(starts[n], starts[n + 1])), (first + n,)) for n in range(size)]
