"""What vLLM's queues want of KV, in blocks (`runtime.controller.BlockDemand`).

Tested with vLLM 0.26 and 0.32. Relies on: Scheduler.{running, waiting, max_num_running_reqs,
max_num_scheduled_tokens, kv_cache_manager}, KVCacheManager.coordinator,
KVCacheCoordinator.single_type_managers, SingleTypeKVCacheManager.{block_size, kv_cache_spec},
SlidingWindowSpec.sliding_window, Request.{num_tokens, num_computed_tokens, max_tokens,
num_prompt_tokens}.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import SlidingWindowSpec

from pagedweight.core.observation import blocks_for
from pagedweight.runtime.controller import BlockDemand
from pagedweight.serving.elastic.backend import on_gpu

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

HORIZON, GPU_HORIZON = 8, 16
"""Tokens that a running request may still get before blocks asked for now can be used: a plan takes
about two steps to give memory, and steps run one ahead. On a GPU memory also waits for running
steps, and for the driver (4 to 8 steps in bench movement)."""


@dataclass(frozen=True)
class GroupBlocks:
    """How a group of layers takes blocks: `size` tokens each; a sliding group gives back those
    that have left its `window`, None for a group that keeps all."""

    size: int
    window: int | None = None

    def held(self, tokens: int, at_once: int = 1) -> int:
        """Most blocks of a request with `tokens` tokens, of which a step computes `at_once`.

        The bound of a window is vLLM's own for admission: it may begin inside a block.
        """
        whole = blocks_for([tokens], self.size)
        if self.window is None:
            return whole
        return min(whole, blocks_for([self.window - 1 + at_once], self.size) + 1)


def groups_of(scheduler: Scheduler) -> list[GroupBlocks]:
    """The scheduler's KV cache groups, all of which take their blocks from the one pool."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [GroupBlocks(manager.block_size, _window(manager.kv_cache_spec)) for manager in managers]


def _window(spec: Any) -> int | None:
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None


def block_demand(scheduler: Scheduler, free_blocks: int) -> BlockDemand:
    """Waiting prompts in full, as many as may run; growth of running requests until help comes."""
    groups, step = groups_of(scheduler), scheduler.max_num_scheduled_tokens
    room = max(0, scheduler.max_num_running_reqs - len(scheduler.running))
    prompts = [request.num_tokens + 1 for request in islice(iter(scheduler.waiting), room)]
    waiting = [sum(group.held(tokens, min(tokens, step)) for group in groups) for tokens in prompts]
    horizon = GPU_HORIZON if on_gpu() else HORIZON
    return BlockDemand(
        free_blocks=free_blocks,
        pending_blocks=sum(waiting),
        head_blocks=sum(waiting[:1]),
        growth_blocks=sum(_growth(run, groups, step, horizon) for run in scheduler.running),
    )


def _growth(request: Any, groups: list[GroupBlocks], step: int, horizon: int) -> int:
    """Blocks beyond those of the computed tokens: the rest of the prompt and some output."""
    start = request.num_computed_tokens
    end = min(
        max(request.num_tokens, start) + horizon,
        request.num_prompt_tokens + request.max_tokens,
    )
    at_once = min(max(1, request.num_tokens - start), step)
    return sum(max(0, group.held(end, at_once) - group.held(start)) for group in groups)
