"""A budget for a tiny model: all bits at rest, and KV for a few requests."""

from __future__ import annotations

import json

from pagedweight.checkpoint.names import architecture_of
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.planner import PlanContext
from pagedweight.core.size_class import SlotCounts
from pagedweight.memory.interface import pages_of
from pagedweight.runtime.startup import reserve_pages
from pagedweight.serving.elastic.budget import KVBlock, plan_context
from pagedweight.serving.elastic.dealing import Dealing, Parallel
from pagedweight.serving.kv_groups import kv_groups
from pagedweight.serving.options import ServeOptions

PAGE = 4096
TOKENS = 704
"""KV at rest: a request of the greatest length and a little, so that a few make pressure."""


def tiny_memory(checkpoint: Checkpoint, parallel: Parallel) -> int:
    """--memory, in pages of PAGE, of which experts at all bits and KV of TOKENS leave nothing."""
    config = json.loads((checkpoint.path / "config.json").read_text())
    latent = "kv_lora_rank" in config
    groups = kv_groups(architecture_of(config).facts(config).kv, 16 if latent else 32, 4)
    assert groups is not None
    dealing = Dealing.of(checkpoint, parallel)
    options = ServeOptions(memory=PAGE, page_bytes=PAGE)
    contexts = dealing.contexts(plan_context(checkpoint, options, parallel.cuts))
    count = next(n for n in range(TOKENS) if groups.tokens(n) >= TOKENS)
    blocks = dealing.blocks(groups.block)
    return PAGE * max(_pages(*each, count) for each in zip(contexts, blocks, strict=True))


def _pages(context: PlanContext, block: KVBlock, count: int) -> int:
    top = SlotCounts.of_bits(context.sizes, context.resting_bits)
    kv = count * block.layers * pages_of(block.layer_bytes, PAGE)
    return context.pages.held_by(top) // PAGE + reserve_pages(context.sizes, PAGE) + kv
