"""What serving a model will take, from its config.json alone: before anything is downloaded.

Bytes of experts and KV are those of the runtime, since the runtime's own code counts them: arenas
in whole pages as large as a GPU's, KV in whole granules, the reserve for lowering. Beside them
stand the weights that stay as they are, the kernels' table of addresses, and a stated reserve for
everything that vLLM takes beyond weights and KV.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from pagedweight.checkpoint.architecture import ModelFacts, text_config
from pagedweight.checkpoint.names import architecture_of
from pagedweight.checkpoint.plain_weights import PlainWeights, plain_weights
from pagedweight.core.calibration import Calibration
from pagedweight.core.geometry import KINDS, MAX_BITS
from pagedweight.core.planner import PlanContext
from pagedweight.core.policy import Policy
from pagedweight.core.size_class import SizeClassPages, SlotCounts
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.errors import UserError
from pagedweight.serving.elastic.backend import (
    GPU_PAGE,
    LARGEST_GPU_PAGE,
    LEAST_PAGES,
    gpu_page_bytes,
)
from pagedweight.serving.elastic.budget import Budget, KVBlock, divide
from pagedweight.serving.kv_groups import KVGroups, kv_groups
from pagedweight.serving.options import ServeOptions

LEVELS = (2, 3, 4, 5, 6)
RESERVE_SHARE = 0.08
"""Share of the budget for activations, graphs and the driver: what vLLM leaves out by its default
gpu_memory_utilization of 0.92."""
ROW_TABLE_BYTES = 8 * (MAX_BITS + 1) + 4
"""The kernels' addresses and bits of one linear block (runtime/kernel_tables.py)."""


@dataclass(frozen=True)
class Question:
    """budget: bytes of device memory for everything, None: no budget. reserve: bytes of it that are
    neither weights nor KV, None: RESERVE_SHARE. levels: precisions to store. page_bytes: of the
    memory pool, None: as large as a GPU's for that memory. block_tokens: of a KV block."""

    budget: int | None = None
    reserve: int | None = None
    levels: tuple[int, ...] = LEVELS
    page_bytes: int | None = None
    block_tokens: int = 16


@dataclass(frozen=True, eq=False)
class Forecast:
    """What a config.json and a question come to; `at` and `elastic` answer it."""

    question: Question
    facts: ModelFacts
    plain: PlainWeights
    context: PlanContext

    @staticmethod
    def of(config: Mapping[str, Any], question: Question) -> Forecast:
        """Raises UserError for a model that is not supported or a config that lacks something."""
        architecture = architecture_of(config)
        facts = architecture.facts(config)
        index = BlockIndex(len(facts.moe_layers), facts.shape.experts)
        sizes = SizeTable.of(facts.shape, question.levels)
        policy = Policy(use_sensitivity=False)  # nothing is measured yet: bits fall level by level
        context = PlanContext.of(index, sizes, _nothing_measured(index, sizes), policy, GPU_PAGE)
        found = Forecast(question, facts, plain_weights(config, architecture, facts), context)
        return found._in_pages_of(question.page_bytes or gpu_page_bytes(found._left))

    @property
    def host_bytes(self) -> int:
        """The host tier: all planes and the tables of all levels."""
        sizes = self.context.sizes
        row = sizes.planes * sum(sizes.plane_bytes) + int(sizes.table_bytes.sum())
        return row * self.context.index.rows // len(KINDS)

    @property
    def table_bytes(self) -> int:
        """The kernels' table of addresses."""
        return ROW_TABLE_BYTES * self.context.index.rows

    @property
    def reserve(self) -> int:
        """Bytes of the budget that are neither weights nor KV."""
        stated, budget = self.question.reserve, self.question.budget or 0
        return int(budget * RESERVE_SHARE) if stated is None else stated

    @property
    def memory(self) -> int:
        """What is left of the budget for experts and KV: the value for `serve --memory`."""
        return self._left - self._left % self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Of the memory pool."""
        return self.context.pages.page_bytes

    @property
    def _left(self) -> int:
        """`memory` before it is cut to whole pages."""
        left = (self.question.budget or 0) - self.reserve - self.plain.nbytes - self.table_bytes
        return max(0, left)

    @property
    def kv_value_bytes(self) -> int:
        """KV is kept in the model's own type."""
        dtype: torch.dtype = getattr(torch, self.plain.dtype)
        return dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of a token while every layer keeps it."""
        return sum(layer.values() for layer in self.facts.kv) * self.kv_value_bytes

    @property
    def lasting_token_bytes(self) -> int:
        """Bytes of KV of a token that has left the windows of sliding layers."""
        lasting = (layer.values() for layer in self.facts.kv if layer.window is None)
        return sum(lasting) * self.kv_value_bytes

    @property
    def one_size(self) -> bool:
        """Whether all layers keep equally many bytes of a token."""
        return len({layer.values() for layer in self.facts.kv}) == 1

    @property
    def groups(self) -> KVGroups | None:
        """How layers share KV blocks; None when their blocks cannot be made one size."""
        return kv_groups(self.facts.kv, self.question.block_tokens, self.kv_value_bytes)

    @property
    def can_be_elastic(self) -> bool:
        """Whether `serve --memory` takes the model: all KV blocks are, or can be made, one size."""
        return self.groups is not None

    @property
    def block(self) -> KVBlock:
        """A KV block; sizes that cannot be made one are taken together, which rounds a little."""
        if self.groups is not None:
            return self.groups.block
        return KVBlock(1, self.token_bytes * self.question.block_tokens)

    def held(self, bits: int) -> int:
        """Bytes of whole pages that all experts at `bits` hold."""
        counts = SlotCounts.of_bits(self.context.sizes, self._uniform(bits))
        return self.context.pages.held_by(counts)

    def at(self, bits: int) -> Budget | None:
        """The budget divided with all experts at `bits` for good; None when it does not reach."""
        return self._divided(self.memory, bits)

    def elastic(self) -> Budget | None:
        """The budget divided for elastic serving: precise at start, KV as the load asks."""
        return self._divided(self.memory, None)

    def least_budget(self, bits: int) -> int:
        """The smallest budget, to a page, at which `at(bits)` is possible."""
        memory, page = self._least_memory(bits)
        needed = memory + self.plain.nbytes + self.table_bytes
        if self.question.reserve is not None:
            return needed + self.question.reserve
        return int(needed / (1 - RESERVE_SHARE)) + page

    def _least_memory(self, bits: int) -> tuple[int, int]:
        """The smallest `memory` at which `at(bits)` is possible, and its page."""
        if self.question.page_bytes is not None:
            return self._least_pages(bits) * self.page_bytes, self.page_bytes
        page, least = GPU_PAGE, 0
        while True:  # memories in which a page is taken follow one another
            pages = max(self._in_pages_of(page)._least_pages(bits), -(-least // page))
            least = 2 * page * LEAST_PAGES
            if page == LARGEST_GPU_PAGE or pages * page < least:
                return pages * page, page
            page *= 2

    def _least_pages(self, bits: int) -> int:
        """The fewest pages that hold the experts at `bits` and the KV that serving starts with."""
        page = self.page_bytes
        low, high = 0, self.held(bits) // page + 1
        while self._divided(high * page, bits) is None:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self._divided(middle * page, bits) is None else (low, middle)
            )
        return high

    def _in_pages_of(self, page: int) -> Forecast:
        pages = SizeClassPages.of(self.context.sizes, page)
        context = replace(self.context, pages=pages, step_slots=pages.all_step_slots())
        return replace(self, context=context)

    def tokens(self, blocks: int) -> int:
        """Tokens of `blocks` KV blocks while every layer keeps them; one of the blocks is the
        engine's null block."""
        usable = max(0, blocks - 1)
        if self.groups is not None:
            return self.groups.tokens(usable)
        return usable * self.question.block_tokens

    def _uniform(self, bits: int) -> np.ndarray:
        return np.full(self.context.index.rows, bits, np.int32)

    def _divided(self, memory: int, bits: int | None) -> Budget | None:
        fixed = None if bits is None else self._uniform(bits)
        try:
            options = ServeOptions(memory=memory, page_bytes=self.page_bytes, bits=bits)
            return divide(self.context, options, self.block, fixed)
        except UserError:
            return None


def longest(config: Mapping[str, Any]) -> int | None:
    """The model's positions, when the config says."""
    found = text_config(config).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _nothing_measured(index: BlockIndex, sizes: SizeTable) -> Calibration:
    """Every expert alike."""
    shape = (index.layers, index.experts)
    arrays = {
        "tokens": np.ones(shape, np.int64),
        "mass": np.full(shape, 1 / index.experts),
        "error": np.broadcast_to(
            4.0 ** -np.array(sizes.levels), (*shape, len(KINDS), len(sizes.levels))
        ),
    }
    return Calibration.from_arrays(arrays, sizes.levels)
