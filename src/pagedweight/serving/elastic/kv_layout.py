"""Where vLLM puts KV blocks in its allocation, as the memory layer wants to know it.

Layers of one kind are one group with one block table. Where kinds differ (sliding and full
attention) vLLM makes their blocks one size, deals the layers out to groups of at most k, and lets
the groups share k places; a block id belongs to one group at a time:

    place 0   [block 0][block 1][block 2]...      full.0, sliding.0, sliding.2
    place 1   [block 0][block 1][block 2]...      full.1, sliding.1, sliding.3

So a block is k parts of one size whatever the group, and so is what parking and granules count.

Tested with vLLM 0.32: one backing allocation, layer l of block b at
`offset + l * layer_stride + b * block_stride`; and with 0.26: one allocation a place. Relies on:
KVCacheConfig.{num_blocks, kv_cache_tensors, kv_cache_groups}, KVCacheTensor.{size, block_stride,
and layers, offset, layer_stride from 0.30 or shared_by before}, KVCacheGroupSpec.{layer_names,
kv_cache_spec}, KVCacheSpec.page_size_bytes, UniformTypeKVCacheSpecs.kv_cache_specs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pagedweight.errors import UserError
from pagedweight.memory.interface import pages_of
from pagedweight.memory.kv_region import Granule, strided_granules
from pagedweight.serving.elastic.budget import KVBlock


def kv_block(groups: Iterable[Any]) -> KVBlock:
    """The block that KV cache groups share; UserError when their layers' blocks differ in size."""
    groups = list(groups)
    sizes = {size for group in groups for size in _part_sizes(group)}
    if len(sizes) != 1:
        raise UserError(
            f"elastic KV needs layers with KV blocks of one size; this model has "
            f"{sorted(sizes)} bytes: serve it with --bits or --plan"
        )
    return KVBlock(max(len(group.layer_names) for group in groups), sizes.pop())


def _part_sizes(group: Any) -> list[int]:
    """Bytes of a block in each layer of a group; layers of one type may differ in size."""
    spec = group.kv_cache_spec
    by_layer = getattr(spec, "kv_cache_specs", None)
    if by_layer is None:
        return [spec.page_size_bytes]
    return [by_layer[name].page_size_bytes for name in group.layer_names]


@dataclass(frozen=True)
class KVLayout:
    """nbytes: the range that holds everything. granules: of the range. parts: offset and bytes of
    each allocation that vLLM makes, in its order."""

    nbytes: int
    granules: list[Granule]
    parts: list[tuple[int, int]]


def kv_layout(config: Any, granule_blocks: int, page_bytes: int) -> KVLayout:
    """Where the blocks of a KVCacheConfig lie. UserError on a layout that is not read here."""
    block = kv_block(config.kv_cache_groups)
    tensors = config.kv_cache_tensors
    if all(hasattr(tensor, "layer_stride") for tensor in tensors):
        starts, parts = _one_allocation(config, block)
    else:
        starts, parts = _one_a_place(config, block, page_bytes)
    size = config.num_blocks * block.layer_bytes
    over = [second for first, second in pairwise(starts) if second - first < size]
    if len(starts) != block.layers or over:
        raise UserError(
            "elastic KV needs a layout in which groups of layers share all their KV; this one has "
            f"{len(starts)} places of {size} bytes at {starts} for groups of at most "
            f"{block.layers} layers: serve it with --bits or --plan"
        )
    granules = strided_granules(config.num_blocks, granule_blocks, block.layer_bytes, starts)
    return KVLayout(parts[-1][0] + parts[-1][1], granules, parts)


def _one_allocation(config: Any, block: KVBlock) -> tuple[list[int], list[tuple[int, int]]]:
    """vLLM 0.30 and later: where each place begins in the one allocation. Groups lie over each
    other, so their layers begin at the same bytes."""
    starts: set[int] = set()
    for tensor in config.kv_cache_tensors:
        if tensor.block_stride != block.layer_bytes:
            raise UserError(
                "elastic KV needs a layout in which a layer's blocks lie next to each other "
                f"(stride {tensor.block_stride}, block {block.layer_bytes}): choose another "
                "VLLM_KV_CACHE_LAYOUT"
            )
        starts |= {tensor.offset + n * tensor.layer_stride for n in range(len(tensor.layers))}
    return sorted(starts), [(0, config.kv_cache_tensors[0].size)]


def _one_a_place(
    config: Any, block: KVBlock, page_bytes: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """vLLM 0.26: an allocation for each place; here each begins on a page of its own."""
    size = config.num_blocks * block.layer_bytes
    group_of = {
        name: n for n, group in enumerate(config.kv_cache_groups) for name in group.layer_names
    }
    for tensor in config.kv_cache_tensors:
        alone = len({group_of[name] for name in tensor.shared_by}) == len(tensor.shared_by)
        if tensor.block_stride or not alone or tensor.size != size:
            raise UserError(
                "elastic KV needs one KV tensor for each layer of a group; this model has one of "
                f"{tensor.size} bytes for {len(tensor.shared_by)} layers with block stride "
                f"{tensor.block_stride}, where {size} bytes for one layer were expected: serve it "
                "with --bits or --plan"
            )
    apart = pages_of(size, page_bytes) * page_bytes
    starts = [place * apart for place in range(len(config.kv_cache_tensors))]
    return starts, [(start, size) for start in starts]
