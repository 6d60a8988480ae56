"""Full-size random MoE layers on a GPU, quickly: what kernel benchmarks run on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedweight.core.geometry import KINDS, MAX_BITS, BlockGeometry, LayerShape
from pagedweight.kernels.contract import Activation, BlockTable
from pagedweight.kernels.synthetic import Routing, random_routing


@dataclass(frozen=True)
class ModelShape:
    """The routed experts of a model's MoE layer as benchmarks name it.

    layers: how many different ones a timed replay walks through, so that none is still in the L2.
    """

    name: str
    layer: LayerShape
    top_k: int
    activation: Activation
    layers: int


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("qwen1.5-moe", LayerShape(60, 2048, 1408), 4, "silu", 8),
        ModelShape("mixtral", LayerShape(8, 4096, 14336), 2, "silu", 3),
        ModelShape("gemma-4", LayerShape(128, 2816, 704), 8, "gelu_tanh", 8),
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
    planes: tuple[torch.Tensor, ...]
    tables: list[torch.Tensor]
    table: BlockTable


@dataclass(frozen=True)
class Tokens:
    """Routed tokens: x and out [T, H] bfloat16, weights float32 and ids int32 [T, k]."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    out: torch.Tensor


def random_words(
    block: BlockGeometry, planes: int, experts: int, gen: torch.Generator
) -> torch.Tensor:
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


def choose_bits(name: str, experts: int) -> torch.Tensor:
    """int32 [E, 2] on the CPU: a number for all blocks, or "mix" for 3..6 at random."""
    if name == "mix":
        gen = torch.Generator().manual_seed(0)
        return torch.randint(3, 7, (experts, len(KINDS)), dtype=torch.int32, generator=gen)
    return torch.full((experts, len(KINDS)), int(name), dtype=torch.int32)


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
    return RandomLayer(bits, planes, tables, table)


def make_tokens(model: ModelShape, batch: int, routing: Routing, gen: torch.Generator) -> Tokens:
    """Random activations and routing for one layer."""
    device, shape = gen.device, model.layer
    weights, ids = random_routing(batch, shape.experts, model.top_k, routing, device, gen)
    x = torch.randn((batch, shape.hidden), device=device, generator=gen).to(torch.bfloat16)
    return Tokens(x, weights, ids, torch.empty_like(x))


def bytes_read(shape: LayerShape, bits: torch.Tensor, ids: torch.Tensor) -> int:
    """Bytes of planes and tables of the experts that `ids` name: the least a kernel reads."""
    hit = ids.unique().tolist()
    blocks = enumerate(shape.blocks)
    return sum(b.resident_bytes(int(bits[e, kind])) for kind, b in blocks for e in hit)
