"""Parked blocks on vLLM's own block pool: never handed out, never counted, never cached."""

from __future__ import annotations

import pytest

from pagedweight.serving.elastic.parking import ParkedBlocks

SIZE = 4
BLOCKS = 16


@pytest.fixture
def pool():
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=16)


def _cache(pool, block, name: bytes):
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    key = make_block_hash_with_group_id(BlockHash(name), 0)
    block.set_block_hash(key, num_tokens=16)
    pool.cached_block_hash_to_block.insert(key, block)
    return BlockHash(name)


def test_only_backed_blocks_are_handed_out_and_the_null_block_is_not_one(pool):
    parking = ParkedBlocks(pool, SIZE, usable=[0, 2])
    assert parking.free_blocks == 2 * SIZE - 1
    taken = pool.get_new_blocks(2 * SIZE - 1)
    assert {block.block_id // SIZE for block in taken} == {0, 2}
    assert 0 not in {block.block_id for block in taken}
    assert pool.get_usage() == 1.0
    with pytest.raises(ValueError, match="Cannot get"):
        pool.get_new_blocks(1)


def test_a_granule_in_use_is_not_parked_and_nothing_changes(pool):
    parking = ParkedBlocks(pool, SIZE, usable=[0, 1])
    used = pool.get_new_blocks(4)
    assert any(block.block_id >= SIZE for block in used)
    free = parking.free_blocks
    assert not parking.park(1)
    assert not parking.park(0), "the null block is always in use"
    assert parking.free_blocks == free
    pool.free_blocks(used)
    assert parking.park(1)
    assert parking.free_blocks == SIZE - 1
    parking.unpark(1)
    assert parking.free_blocks == 2 * SIZE - 1


def test_a_parked_block_is_no_cached_prefix(pool):
    parking = ParkedBlocks(pool, SIZE, usable=[0, 1])
    name = _cache(pool, pool.blocks[5], b"five")
    assert pool.get_cached_block(name, [0]) is not None
    assert parking.park(1)
    assert pool.get_cached_block(name, [0]) is None


def test_a_granule_drains_as_its_blocks_are_freed(pool):
    parking = ParkedBlocks(pool, SIZE, usable=[0, 1, 2])
    used = pool.get_new_blocks(SIZE)
    inside = [block for block in used if block.block_id // SIZE == 1]
    assert parking.in_use(1) == len(inside) == 1
    name = _cache(pool, pool.blocks[6], b"six")
    backed = parking.free_blocks
    assert parking.drain(1) == 1
    assert parking.held_back == SIZE - 1
    assert parking.free_blocks == backed, "they have their memory"
    assert pool.get_cached_block(name, [0]) is None
    rest = pool.get_new_blocks(pool.get_num_free_blocks())
    assert 1 not in {block.block_id // SIZE for block in rest}, "nobody is handed one"
    assert pool.get_usage() == 1.0
    pool.free_blocks(rest)
    held = _cache(pool, inside[0], b"held")
    pool.free_blocks(inside)
    assert pool.get_cached_block(held, [0]) is not None
    assert parking.drain(1) == 0
    assert pool.get_cached_block(held, [0]) is None
    assert parking.held_back == 0, "it is parked now"
    assert pool.num_gpu_blocks == 2 * SIZE
    parking.unpark(1)
    pool.free_blocks([block for block in used if block not in inside])
    assert parking.free_blocks == pool.get_num_free_blocks() == 3 * SIZE - 1


def test_a_granule_that_drains_is_handed_out_again_when_refilled(pool):
    parking = ParkedBlocks(pool, SIZE, usable=[0, 1])
    used = pool.get_new_blocks(SIZE)
    assert parking.drain(1) == 1
    parking.refill(1)
    assert parking.held_back == 0
    assert pool.num_gpu_blocks == 2 * SIZE
    rest = pool.get_new_blocks(SIZE - 1)
    assert {block.block_id // SIZE for block in rest} == {1}
    pool.free_blocks([*used, *rest])
    assert pool.reset_prefix_cache()
    assert parking.park(1)


def test_a_prefix_in_use_in_a_granule_that_drains_can_still_be_shared(pool):
    parking = ParkedBlocks(pool, SIZE, usable=[0, 1])
    used = pool.get_new_blocks(SIZE)
    inside = next(block for block in used if block.block_id >= SIZE)
    name = _cache(pool, inside, b"shared")
    assert parking.drain(1) == 1
    (found,) = pool.get_cached_block(name, [0])
    pool.touch([found])
    pool.free_blocks([inside])
    assert parking.drain(1) == 1, "the other request has it"
    pool.free_blocks([inside])
    assert parking.drain(1) == 0


def test_prefixes_computed_at_other_bits_are_forgotten_in_use_or_not(pool):
    parking = ParkedBlocks(pool, SIZE, usable=[0, 1])
    used = pool.get_new_blocks(1)[0]
    names = [_cache(pool, used, b"used"), _cache(pool, pool.blocks[6], b"free")]
    parking.forget_prefixes()
    assert all(pool.get_cached_block(name, [0]) is None for name in names)
    assert used.ref_cnt == 1, "who runs keeps its blocks"


def test_vllm_can_still_reset_its_prefix_cache(pool):
    ParkedBlocks(pool, SIZE, usable=[0, 1])
    assert pool.reset_prefix_cache()
