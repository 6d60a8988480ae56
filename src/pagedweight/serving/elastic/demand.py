"""What vLLM's queues want of KV, in blocks (`runtime.controller.BlockDemand`).

Tested with vLLM 0.26 and 0.32. Relies on: Scheduler.{running, waiting, max_num_running_reqs,
block_size}, Request.{num_tokens, num_computed_tokens, max_tokens, num_prompt_tokens}.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from pagedweight.core.observation import blocks_for
from pagedweight.runtime.controller import BlockDemand
from pagedweight.serving.elastic.backend import on_gpu

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

HORIZON, GPU_HORIZON = 8, 16
"""Tokens that a running request may still get before blocks asked for now can be used: a plan takes
about two steps to give memory, and steps run one ahead. On a GPU memory also waits for running
steps, and for the driver (4 to 8 steps in bench movement)."""


def block_demand(scheduler: Scheduler, free_blocks: int) -> BlockDemand:
    """Waiting prompts in full, as many as may run; growth of running requests until help comes."""
    size = scheduler.block_size
    room = max(0, scheduler.max_num_running_reqs - len(scheduler.running))
    waiting = [_after_prefill(request) for request in islice(iter(scheduler.waiting), room)]
    horizon = GPU_HORIZON if on_gpu() else HORIZON
    growth = sum(_growth(request, size, horizon) for request in scheduler.running)
    return BlockDemand(
        free_blocks=free_blocks,
        pending_blocks=blocks_for(waiting, size),
        head_blocks=blocks_for(waiting[:1], size),
        growth_blocks=growth,
    )


def blocks_of(request: Any, block_size: int) -> int:
    """Blocks that `request` holds once it has all its tokens."""
    return blocks_for([request.num_prompt_tokens + request.max_tokens], block_size)


def _after_prefill(request: Any) -> int:
    return request.num_tokens + 1


def _growth(request: Any, size: int, horizon: int) -> int:
    """Blocks beyond those of the computed tokens: the rest of the prompt and some output."""
    end = min(
        max(request.num_tokens, request.num_computed_tokens) + horizon,
        request.num_prompt_tokens + request.max_tokens,
    )
    return max(0, blocks_for([end], size) - blocks_for([request.num_computed_tokens], size))
