"""Where vLLM puts KV blocks in its allocation, as the memory layer wants to know it.

Tested with vLLM 0.32: one backing allocation, layer l of block b at
`offset + l * layer_stride + b * block_stride`; and with 0.26: one allocation a layer. Relies on:
KVCacheConfig.{num_blocks, kv_cache_tensors, kv_cache_groups}, KVCacheTensor.{size, block_stride,
and layers, offset, layer_stride from 0.30 or shared_by before}, KVCacheSpec.page_size_bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pagedweight.errors import UserError
from pagedweight.memory.interface import pages_of
from pagedweight.memory.kv_region import Granule, strided_granules
from pagedweight.serving.elastic.budget import KVBlock


def kv_block_of_specs(specs: Iterable[Any]) -> KVBlock:
    """The block of a model whose layers have these KV specs; UserError when they differ."""
    sizes = [spec.page_size_bytes for spec in specs]
    if len(set(sizes)) != 1:
        raise UserError(
            f"elastic KV needs layers with KV blocks of one size; this model has "
            f"{sorted(set(sizes))} bytes: serve it with --bits or --plan"
        )
    return KVBlock(layers=len(sizes), layer_bytes=sizes[0])


def kv_block(config: Any) -> KVBlock:
    """The block of a KVCacheConfig."""
    return kv_block_of_specs(
        group.kv_cache_spec for group in config.kv_cache_groups for _ in group.layer_names
    )


@dataclass(frozen=True)
class KVLayout:
    """nbytes: the range that holds everything. granules: of the range. parts: offset and bytes of
    each allocation that vLLM makes, in its order."""

    nbytes: int
    granules: list[Granule]
    parts: list[tuple[int, int]]


def kv_layout(config: Any, granule_blocks: int, page_bytes: int) -> KVLayout:
    """Where the blocks of a KVCacheConfig lie. UserError on a layout that is not read here."""
    block = kv_block(config)
    tensors = config.kv_cache_tensors
    if all(hasattr(tensor, "layer_stride") for tensor in tensors):
        strides, parts = _one_allocation(tensors, block)
    else:
        strides, parts = _one_a_layer(tensors, block, config.num_blocks, page_bytes)
    granules = strided_granules(config.num_blocks, granule_blocks, block.layer_bytes, strides)
    return KVLayout(parts[-1][0] + parts[-1][1], granules, parts)


def _one_allocation(tensors: Any, block: KVBlock) -> tuple[list[int], list[tuple[int, int]]]:
    """vLLM 0.30 and later: where each layer begins in the one allocation."""
    strides = []
    for tensor in tensors:
        if tensor.block_stride != block.layer_bytes:
            raise UserError(
                "elastic KV needs a layout in which a layer's blocks lie next to each other "
                f"(stride {tensor.block_stride}, block {block.layer_bytes}): choose another "
                "VLLM_KV_CACHE_LAYOUT"
            )
        strides += [tensor.offset + n * tensor.layer_stride for n in range(len(tensor.layers))]
    return strides, [(0, tensors[0].size)]


def _one_a_layer(
    tensors: Any, block: KVBlock, blocks: int, page_bytes: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """vLLM 0.26: an allocation for each layer; here each begins on a page of its own."""
    size = blocks * block.layer_bytes
    for tensor in tensors:
        if tensor.block_stride or len(tensor.shared_by) != 1 or tensor.size != size:
            raise UserError(
                "elastic KV needs one KV tensor for each layer; this model has one of "
                f"{tensor.size} bytes for {len(tensor.shared_by)} layers with block stride "
                f"{tensor.block_stride}, where {size} bytes for one layer were expected: serve it "
                "with --bits or --plan"
            )
    apart = pages_of(size, page_bytes) * page_bytes
    strides = [layer * apart for layer in range(len(tensors))]
    return strides, [(start, size) for start in strides]
