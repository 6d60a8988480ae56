"""Full-size random MoE layers on a GPU, quickly: what kernel benchmarks run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedweight.core.geometry import KINDS, MAX_BITS, BlockGeometry, LayerShape
from pagedweight.kernels.contract import BlockTable


@dataclass(frozen=True)
class ModelShape:
    """The routed experts of a model's MoE layer as benchmarks name it."""

    name: str
    layer: LayerShape
    top_k: int
    activation: str


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen1.5-moe", LayerShape(60, 2048, 1408), 4, "silu"),
        ModelShape("mixtral", LayerShape(8, 4096, 14336), 2, "silu"),
        ModelShape("gemma-4", LayerShape(128, 2816, 704), 8, "gelu_tanh"),
    )
}


@dataclass(frozen=True)
class RandomLayer:
    """A committed layer; owns the memory that `table` points at.

    bits:   int32 [E, 2] on the CPU.
    planes: by kind, int32 [P, E, plane words]: random bits are random codes.
    tables: by expert and kind, [padded rows, 2^q] ascending centroids of about 1/sqrt(K).
    """

    bits: torch.Tensor
    planes: tuple[torch.Tensor, torch.Tensor]
    tables: list[torch.Tensor]
    table: BlockTable


def random_words(block: BlockGeometry, planes: int, experts: int, gen: torch.Generator):
    """int32 [planes, E, plane words] of random bits."""
    size = (planes, experts, block.plane_words)
    low, high = -(2**31), 2**31
    return torch.randint(low, high, size, dtype=torch.int32, device=gen.device, generator=gen)


def random_centroids(
    block: BlockGeometry, bits: int, dtype: torch.dtype, gen: torch.Generator
) -> torch.Tensor:
    """[padded rows, 2^bits], ascending along a row."""
    size = (block.padded_rows, 1 << bits)
    values = torch.randn(size, device=gen.device, generator=gen) * block.cols**-0.5
    return values.sort(dim=1).values.to(dtype)


def make_layer(
    shape: LayerShape, bits: torch.Tensor, dtype: torch.dtype, gen: torch.Generator
) -> RandomLayer:
    """A layer committed at `bits` (int32 [E, 2], CPU) on the generator's device."""
    most = int(bits.max())
    planes = tuple(random_words(block, most, shape.experts, gen) for block in shape.blocks)
    tables = []
    addresses = torch.zeros((shape.experts, len(KINDS), MAX_BITS), dtype=torch.int64)
    table_addresses = torch.zeros((shape.experts, len(KINDS)), dtype=torch.int64)
    for expert in range(shape.experts):
        for kind, block in enumerate(shape.blocks):
            committed = int(bits[expert, kind])
            tables.append(random_centroids(block, committed, dtype, gen))
            table_addresses[expert, kind] = tables[-1].data_ptr()
            for plane in range(committed):
                addresses[expert, kind, plane] = planes[kind][plane, expert].data_ptr()
    device = gen.device
    table = BlockTable(bits.to(device), addresses.to(device), table_addresses.to(device))
    return RandomLayer(bits, planes, tables, table)  # type: ignore[arg-type]
