"""How a budget is divided: the start of a paged server, and fixed bits that give KV the rest."""

from __future__ import annotations

import pytest

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.policy import Policy
from pagedweight.core.policy_file import save_policy
from pagedweight.errors import UserError
from pagedweight.memory.host import HostDevice
from pagedweight.memory.host_tier import CheckpointTier
from pagedweight.runtime.startup import open_rank, reserve_pages
from pagedweight.serving.elastic.budget import KVBlock, divide, fixed_bits, plan_context
from pagedweight.serving.options import ServeOptions
from quantized import make_quantized

BLOCK = KVBlock(layers=3, layer_bytes=4096)
PAGE = 4096
MEMORY = 700_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("budget")
    make_quantized(path / "out")
    save_policy(Policy(offload_blocks=2, reload_blocks=6), path / "policy.json")
    return Checkpoint.open(path / "out")


def budget_of(checkpoint, memory=MEMORY, **options):
    policy = str(checkpoint.path.parent / "policy.json")
    given = ServeOptions(memory=memory, page_bytes=PAGE, policy=policy, **options)
    context = plan_context(checkpoint, given, 1)
    return divide(context, given, BLOCK, fixed_bits(checkpoint, given)), context


def test_fixed_bits_give_kv_all_the_rest(checkpoint):
    budget, _ = budget_of(checkpoint, bits=6)
    assert budget.reserve == 0
    left = budget.pages - budget.weight_pages - budget.usable_granules * budget.granule_pages
    assert 0 <= left < budget.granule_pages
    assert budget.reachable_blocks == budget.usable_granules * budget.granule_blocks


def test_a_paged_server_keeps_pages_for_lowering_and_blocks_to_come_back_with(checkpoint):
    budget, context = budget_of(checkpoint)
    assert budget.reserve == reserve_pages(context.sizes, PAGE) > 0
    assert budget.usable_granules * budget.granule_blocks >= 6 + 2
    assert budget.reachable_blocks > budget.usable_granules * budget.granule_blocks
    needed = budget.weight_pages + budget.reserve + budget.usable_granules * budget.granule_pages
    assert needed <= budget.pages


def test_frozen_bits_are_those_that_a_paged_server_starts_with(checkpoint):
    memory = next(
        m for m in range(MEMORY, 0, -8 * PAGE) if budget_of(checkpoint, m)[0].bits.mean() < 5.5
    )
    paged, frozen = (budget_of(checkpoint, memory, **o)[0] for o in ({}, {"freeze": True}))
    assert frozen.bits.tolist() == paged.bits.tolist()
    assert frozen.usable_granules == paged.usable_granules
    assert frozen.reachable_blocks == frozen.usable_granules * frozen.granule_blocks


def test_the_least_that_fixed_bits_take_is_named_and_does(checkpoint):
    with pytest.raises(UserError, match=r"at these bits.* give at least --memory (\d+)") as refused:
        budget_of(checkpoint, PAGE * 8, bits=6)
    least = int(str(refused.value).rsplit(" ", 1)[1])
    budget, _ = budget_of(checkpoint, least, bits=6)
    assert budget.usable_granules * budget.granule_blocks >= 2
    with pytest.raises(UserError):
        budget_of(checkpoint, least - 1, bits=6)


def test_the_pool_of_a_rank_keeps_what_the_budget_says(checkpoint):
    budget, _ = budget_of(checkpoint, bits=4)
    tier = CheckpointTier(checkpoint, tuple(range(checkpoint.shape.experts)), 0, 1)
    worker = open_rank(HostDevice(PAGE), tier, budget.bits, MEMORY, reserve=budget.reserve)
    pool = worker.mover.weights.pool
    assert pool.reserve == 0
    assert pool.can_take() >= budget.usable_granules * budget.granule_pages
