"""KV blocks without memory, kept outside vLLM's free queue.

vLLM is told of every block that could ever be backed. A parked block is in no queue and has no
hash, so nobody can be given it; `num_gpu_blocks` of the pool counts the others, which makes usage
and the prefix cache's reset see what is backed. Free blocks of a granule that drains are kept out
likewise; those in use stay with their requests.
Tested with vLLM 0.26 and 0.32. Relies on: BlockPool.{blocks, free_block_queue, null_block,
num_gpu_blocks, evict_blocks}, FreeKVCacheBlockQueue.{remove, append_n}, KVCacheBlock.{ref_cnt,
block_hash}.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class ParkedBlocks:
    """`runtime.granules.BlockParking` over a vLLM block pool."""

    def __init__(self, pool: BlockPool, granule_blocks: int, usable: Iterable[int]) -> None:
        """Park every granule that is not in `usable`. Granule 0 holds the null block."""
        self._pool = pool
        self._granule_blocks = granule_blocks
        self._total = len(pool.blocks)
        # Of granules that drain: blocks in use when last looked at; the others are taken out.
        self._left: dict[int, list[KVCacheBlock]] = {}
        granules = range(-(-self._total // granule_blocks))
        for granule in sorted(set(granules) - set(usable)):
            if not self.park(granule):
                raise AssertionError(f"blocks of granule {granule} are in use at start")

    def _blocks(self, granule: int) -> list[KVCacheBlock]:
        first = granule * self._granule_blocks
        return self._pool.blocks[first : first + self._granule_blocks]

    def park(self, granule: int) -> bool:
        """Take a granule's blocks out of circulation; False when one is in use (or is the null
        block), and then nothing changed."""
        if not self.is_empty(granule):
            return False
        self._take(self._blocks(granule))
        return True

    def unpark(self, granule: int) -> None:
        """Hand a granule's blocks back to the free queue."""
        self._put_back(self._blocks(granule))

    def _take(self, blocks: list[KVCacheBlock]) -> None:
        """Out of the free queue and of the prefix cache."""
        self._pool.evict_blocks({block.block_id for block in blocks if block.block_hash})
        for block in blocks:
            self._pool.free_block_queue.remove(block)
        self._pool.num_gpu_blocks -= len(blocks)

    def _put_back(self, blocks: list[KVCacheBlock]) -> None:
        self._pool.num_gpu_blocks += len(blocks)
        self._pool.free_block_queue.append_n(blocks)

    def in_use(self, granule: int) -> int:
        """Blocks of a granule that requests hold (the null block counts as held)."""
        return sum(_is_held(block) for block in self._blocks(granule))

    def is_empty(self, granule: int) -> bool:
        """Whether no request holds a block of a granule; the first that is held answers."""
        return not any(_is_held(block) for block in self._blocks(granule))

    def drain(self, granule: int) -> int:
        """Take the free blocks of a granule out of circulation; how many others there are. With
        none it is parked, as by `park`."""
        blocks = self._left.pop(granule, None) or self._blocks(granule)
        left = [block for block in blocks if _is_held(block)]
        self._take([block for block in blocks if not _is_held(block)])
        if left:
            self._left[granule] = left
        return len(left)

    def refill(self, granule: int) -> None:
        """The free blocks of a granule that drains may be handed out again."""
        left = {block.block_id for block in self._left.pop(granule)}
        self._put_back([block for block in self._blocks(granule) if block.block_id not in left])

    @property
    def held_back(self) -> int:
        """Free blocks with memory that nobody is handed, because their granules drain."""
        return sum(len(self._blocks(granule)) - len(left) for granule, left in self._left.items())

    @property
    def free_blocks(self) -> int:
        """F_blk: backed blocks that no request holds, the null block not among them; those held
        back are some of them."""
        return self._pool.get_num_free_blocks() + self.held_back

    def forget_prefixes(self) -> None:
        """Drop every cached prefix: what was computed at other bits is never reused."""
        self._pool.evict_blocks({b.block_id for b in self._pool.blocks if b.block_hash})


def _is_held(block: KVCacheBlock) -> bool:
    """By a request, or as the null block."""
    return bool(block.ref_cnt or block.is_null)
