"""How a rank's memory budget is divided: weights at start, KV at start, KV reachable.

    |<------------------------ pages of the budget ------------------------->|
    | weights at the initial plan          | KV at start  | reserve |          start
    | weights at the floor | KV reachable                 | reserve |          under pressure

Worker and scheduler compute it from the same inputs and so agree without a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import LayerShape
from pagedweight.core.planner import PlanContext, initial_plan
from pagedweight.core.size_class import SizeClassPages, SlotCounts
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.errors import UserError
from pagedweight.memory.interface import pages_of
from pagedweight.serving.elastic.backend import default_page_bytes, lowering_reserve
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.plans import calibration_of, plan_of, policy_of

MOST_GRANULE_BLOCKS = 256


@dataclass(frozen=True)
class KVBlock:
    """layers: parts that a block has, one a layer; layer_bytes: bytes of each part."""

    layers: int
    layer_bytes: int

    @property
    def nbytes(self) -> int:
        """B_KV: bytes of one block over all layers."""
        return self.layers * self.layer_bytes


@dataclass(frozen=True, eq=False)
class Budget:
    """Everything in pages of `page_bytes`, blocks of `block`, granules of `granule_blocks`.

    bits: int32 [rows], the initial plan. usable_granules: backed at start. reachable_blocks: blocks
    that vLLM is told of, the null block among them, whole granules.
    """

    page_bytes: int
    pages: int
    reserve: int
    block: KVBlock
    granule_blocks: int
    bits: NDArray[np.int32]
    weight_pages: int
    floor_pages: int
    usable_granules: int
    reachable_blocks: int

    @property
    def granule_pages(self) -> int:
        """Most pages that one granule takes: each layer's part may share its first and last."""
        part = self.granule_blocks * self.block.layer_bytes
        whole = part % self.page_bytes == 0
        return self.block.layers * (pages_of(part, self.page_bytes) + (0 if whole else 1))

    @property
    def free_pages(self) -> int:
        """Pages that nobody has at the start, at least."""
        kv = self.usable_granules * self.granule_pages
        return self.pages - self.reserve - self.weight_pages - kv


def fixed_bits(checkpoint: Checkpoint, options: ServeOptions) -> NDArray[np.int32] | None:
    """Bits [rows] that `--bits` or `--plan` ask for, None when precision is free."""
    if options.bits is None and options.plan is None:
        return None
    return plan_of(checkpoint, options).astype(np.int32).ravel()


def plan_context(checkpoint: Checkpoint, options: ServeOptions, ranks: int) -> PlanContext:
    """The planner's inputs, with sizes that no rank's part exceeds.

    UserError when the expert width cannot be cut into `ranks` parts.
    """
    check_cut(checkpoint.shape, ranks)
    return PlanContext.of(
        BlockIndex(len(checkpoint.moe_layers), checkpoint.shape.experts),
        SizeTable.largest(checkpoint.shape, checkpoint.bits, ranks),
        calibration_of(checkpoint),
        policy_of(options),
        options.page_bytes or default_page_bytes(options.memory or 0),
    )


def check_cut(shape: LayerShape, ranks: int) -> None:
    """UserError when an expert's width has fewer tiles than `ranks`."""
    try:
        shape.part(0, ranks)
    except ValueError as error:
        raise UserError(f"tensor parallelism: {error}") from error


def check_memory(
    context: PlanContext, options: ServeOptions, fixed: NDArray[np.int32] | None
) -> None:
    """UserError when the memory does not even hold the experts; `divide` knows of KV too."""
    page = context.pages.page_bytes
    pages, held = (options.memory or 0) // page, _pages_at(context, _lowest(context, fixed))
    if held >= pages:
        what = "at their floor" if fixed is None else "at these bits"
        raise UserError(
            f"--memory {options.memory} is {pages} pages of {page} bytes; the experts {what} alone "
            f"take {held}: give more than --memory {held * page}, and what KV needs beside it"
        )


def divide(
    context: PlanContext, options: ServeOptions, block: KVBlock, fixed: NDArray[np.int32] | None
) -> Budget:
    """Divide `options.memory`; `fixed` [rows] are bits that stay, None lets the planner choose.

    Fixed bits need neither a reserve for lowering nor blocks for coming back: KV gets the rest.
    UserError, with the numbers, when the memory does not reach.
    """
    page, policy, sizes = context.pages.page_bytes, context.policy, context.sizes
    assert options.memory is not None
    pages = options.memory // page
    never_lower = fixed is not None and not options.replay
    reserve = 0 if never_lower else lowering_reserve(sizes, page, pages)
    granule = _granule_blocks(block, page)
    shell = Budget(page, pages, reserve, block, granule, context.resting_bits, 0, 0, 0, granule)
    start = -(-(2 if never_lower else policy.reload_blocks + 2) // granule)
    floor_pages = _pages_at(context, _lowest(context, fixed))
    needed = floor_pages + reserve + start * shell.granule_pages
    if needed > pages:
        what = "at their floor" if fixed is None else "at these bits"
        raise UserError(
            f"--memory {options.memory} is {pages} pages of {page} bytes; the experts {what} take "
            f"{floor_pages}, {start * granule} KV blocks at start {start * shell.granule_pages} "
            f"and the reserve {reserve}, {needed} in all: give at least --memory {needed * page}"
        )
    weights = (pages - reserve - start * shell.granule_pages) * page
    bits = initial_plan(context, weights).bits if fixed is None else fixed
    # A replay moves any rows whole at any step: KV stays out of what all rows at their top would
    # take, and of as much again as their tables.
    held = _pages_at(context, bits)
    if options.replay:
        tables = int(sizes.table_bytes.max(axis=1).sum()) * context.index.rows // 2
        held = _pages_at(context, context.resting_bits) + pages_of(tables, page)
    usable = (pages - reserve - held) // shell.granule_pages
    reachable = (
        usable
        if options.still or options.replay
        else (pages - reserve - floor_pages) // shell.granule_pages
    )
    return Budget(
        page, pages, reserve, block, granule, bits, held, floor_pages, usable, reachable * granule
    )


def divide_all(
    contexts: Sequence[PlanContext],
    options: ServeOptions,
    blocks: Sequence[KVBlock],
    fixed: Sequence[NDArray[np.int32] | None],
) -> tuple[Budget, ...]:
    """`divide` for each holding. KV has as many blocks on all of them as the tightest can back."""
    found = [
        divide(*each)
        for each in zip(contexts, [options] * len(contexts), blocks, fixed, strict=True)
    ]
    usable = min(budget.usable_granules for budget in found)
    reachable = min(budget.reachable_blocks for budget in found)
    return tuple(
        replace(budget, usable_granules=usable, reachable_blocks=reachable) for budget in found
    )


def _lowest(context: PlanContext, fixed: NDArray[np.int32] | None) -> NDArray[np.int32]:
    return _floor(context) if fixed is None else fixed


def _floor(context: PlanContext) -> NDArray[np.int32]:
    """Bits of every row at the lowest level that any stage allows."""
    lowest = min(max(int(stage.floors.min()), stage.least) for stage in context.stages)
    return np.full(context.index.rows, context.sizes.levels[lowest], np.int32)


def _pages_at(context: PlanContext, bits: NDArray[np.int32]) -> int:
    pages: SizeClassPages = context.pages
    return pages.held_by(SlotCounts.of_bits(context.sizes, bits)) // pages.page_bytes


def _granule_blocks(block: KVBlock, page: int) -> int:
    """Blocks whose part of a layer is whole pages, if that is not too many."""
    whole = page // math.gcd(page, block.layer_bytes)
    return whole if whole <= MOST_GRANULE_BLOCKS else pages_of(page, block.layer_bytes)
