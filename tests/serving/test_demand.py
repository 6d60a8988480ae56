"""What queues want of KV, in blocks of the one pool, with one group of layers and several."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pagedweight.serving.elastic.demand import HORIZON, GroupBlocks, block_demand

FULL, SLIDING = GroupBlocks(64), GroupBlocks(32, window=48)


def scheduler_of(groups, waiting=(), running=()):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shape = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    managers = [
        SimpleNamespace(
            block_size=group.size,
            kv_cache_spec=FullAttentionSpec(block_size=group.size, **shape)
            if group.window is None
            else SlidingWindowSpec(block_size=group.size, sliding_window=group.window, **shape),
        )
        for group in groups
    ]
    coordinator = SimpleNamespace(single_type_managers=managers)
    return SimpleNamespace(
        kv_cache_manager=SimpleNamespace(coordinator=coordinator),
        max_num_scheduled_tokens=128,
        max_num_running_reqs=8,
        waiting=list(waiting),
        running=list(running),
    )


def request(prompt, tokens, computed, most=1000):
    return SimpleNamespace(
        num_prompt_tokens=prompt, num_tokens=tokens, num_computed_tokens=computed, max_tokens=most
    )


def test_a_group_without_a_window_counts_all_tokens():
    waiting = [request(31, 31, 0), request(32, 32, 0)]
    running = [request(10, 30, 29), request(10, 30, 29, most=20)]
    demand = block_demand(scheduler_of([GroupBlocks(32)], waiting, running), 7)
    assert (demand.free_blocks, demand.pending_blocks, demand.head_blocks) == (7, 1 + 2, 1)
    assert demand.growth_blocks == 1, "the second ends at 30 tokens"


def test_a_waiting_prompt_takes_blocks_of_every_group():
    demand = block_demand(scheduler_of([FULL, SLIDING, SLIDING], [request(99, 99, 0)]), 0)
    assert demand.pending_blocks == 2 + 4 + 4


def test_a_long_prompt_takes_no_more_of_a_sliding_group_than_vllm_reserves():
    """Its window and what one step computes; the first block may be used in part."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    spec = SlidingWindowSpec(
        block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=48
    )
    assert SLIDING.held(100_000, 128) == spec.max_admission_blocks_per_request(128, 1 << 20)
    demand = block_demand(scheduler_of([SLIDING], [request(4000, 4000, 0)]), 0)
    assert demand.pending_blocks == SLIDING.held(100_000, 128) < 4001 // 32


@pytest.mark.parametrize("at", range(200, 264))
def test_answers_beyond_the_window_grow_in_the_full_group_only(at):
    running = [request(100, at, at - 1)]
    demand = block_demand(scheduler_of([FULL, SLIDING, SLIDING], running=running), 0)
    assert demand.growth_blocks == -(-(at + HORIZON) // 64) - -(-(at - 1) // 64)


def test_the_rest_of_a_prompt_is_growth_in_every_group():
    running = [request(300, 300, 0)]
    demand = block_demand(scheduler_of([FULL, SLIDING], running=running), 0)
    assert demand.growth_blocks == 5 + SLIDING.held(308, 128)
