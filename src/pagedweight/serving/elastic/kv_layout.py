"""Where vLLM puts KV blocks in its allocation, as the memory layer wants to know it.

Tested with vLLM 0.32: one backing allocation, layer l of block b at
`offset + l * layer_stride + b * block_stride`. Relies on: KVCacheConfig.{num_blocks,
kv_cache_tensors, kv_cache_groups}, KVCacheTensor.{size, layers, offset, layer_stride,
block_stride}, KVCacheSpec.page_size_bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagedweight.errors import UserError
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


def kv_granules(config: Any, granule_blocks: int) -> tuple[int, list[Granule]]:
    """(bytes of the allocation, granules). UserError on a layout that is not read here."""
    tensors = config.kv_cache_tensors
    if not all(hasattr(tensor, "layer_stride") for tensor in tensors):
        raise UserError("elastic KV knows the KV layout of vLLM 0.32, not this release's")
    block = kv_block(config)
    strides = []
    for tensor in tensors:
        if tensor.block_stride != block.layer_bytes:
            raise UserError(
                "elastic KV needs a layout in which a layer's blocks lie next to each other "
                f"(stride {tensor.block_stride}, block {block.layer_bytes}): choose another "
                "VLLM_KV_CACHE_LAYOUT"
            )
        strides += [tensor.offset + n * tensor.layer_stride for n in range(len(tensor.layers))]
    granules = strided_granules(config.num_blocks, granule_blocks, block.layer_bytes, strides)
    return tensors[0].size, granules
