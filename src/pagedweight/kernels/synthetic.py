"""Random MoE layers and routing to test and time kernels with, on any device.

With `poison`, everything a kernel must not let in is hostile: padding rows and columns hold random
codes, padding rows' centroids are NaN, and planes at and beyond the committed bits point at
garbage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from pagedweight.core.geometry import KINDS, MAX_BITS, MIN_BITS, BlockGeometry, LayerShape
from pagedweight.kernels.contract import BlockTable
from pagedweight.kernels.reference.bits import dequantize_block, pack_padded, row_padding

Routing = Literal["uniform", "zipf", "hot"]


@dataclass(frozen=True)
class SyntheticLayer:
    """One layer's routed experts with random codes and tables; owns what `table` points at.

    bits:       int32 [E, 2] on the CPU, the committed bits.
    planes:     by kind, int32 [P, E, R, C, 32].
    tables:     [expert][kind], [padded rows, 2^q] of `table_dtype`, for the committed bits.
    garbage:    by kind, int32 [R, C, 32], what planes beyond q point at when poisoned.
    table:      the filled `BlockTable`.
    """

    shape: LayerShape
    bits: torch.Tensor
    planes: tuple[torch.Tensor, torch.Tensor]
    tables: list[list[torch.Tensor]]
    garbage: tuple[torch.Tensor, torch.Tensor]
    table: BlockTable
    table_dtype: torch.dtype

    def dense(self, kind: int) -> torch.Tensor:
        """float32 [E, N, K]: the weights that a right kernel multiplies with."""
        block = self.shape.blocks[kind]
        experts = range(self.shape.experts)
        return torch.stack([self._dense_block(e, kind, block) for e in experts])

    def _dense_block(self, expert: int, kind: int, block: BlockGeometry) -> torch.Tensor:
        words = self.planes[kind][: int(self.bits[expert, kind]), expert]
        return dequantize_block(words, self.tables[expert][kind], block, torch.float32)


def random_bits(
    experts: int, generator: torch.Generator, low: int = MIN_BITS, high: int = 6
) -> torch.Tensor:
    """int32 [E, 2] on the CPU: bits of each expert and kind, uniform in low..high."""
    device = generator.device
    bits = torch.randint(low, high + 1, (experts, 2), generator=generator, device=device)
    return bits.to("cpu", torch.int32)


def random_layer(
    shape: LayerShape,
    bits: torch.Tensor,
    table_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
    planes: int = 6,
    poison: bool = True,
) -> SyntheticLayer:
    """Random codes of `planes` bits and centroids of about 1/sqrt(K); `bits` [E, 2] <= planes.

    `generator` lives on `device`; left out, one seeded with 0. Raises ValueError for bits that do
    not fit.
    """
    bits = bits.to("cpu", torch.int32)
    if bits.shape != (shape.experts, 2):
        raise ValueError(f"bits of shape {tuple(bits.shape)} for {shape.experts} experts")
    if not MIN_BITS <= int(bits.min()) <= int(bits.max()) <= planes <= MAX_BITS:
        raise ValueError(f"bits {int(bits.min())}..{int(bits.max())} of {planes} planes")
    gen = generator if generator is not None else torch.Generator(device).manual_seed(0)
    words = tuple(_random_planes(shape.experts, b, planes, poison, gen) for b in shape.blocks)
    tables = [
        [_random_table(b, int(bits[e, k]), table_dtype, poison, gen) for k, b in _kinds(shape)]
        for e in range(shape.experts)
    ]
    garbage = tuple(
        torch.randint(-(2**31), 2**31, w.shape[2:], dtype=torch.int32, generator=gen, device=device)
        for w in words
    )
    table = _fill(bits, words, tables, garbage, poison)
    return SyntheticLayer(shape, bits, words, tables, garbage, table, table_dtype)  # type: ignore[arg-type]


def _kinds(shape: LayerShape) -> list[tuple[int, BlockGeometry]]:
    return list(enumerate(shape.blocks))


def _random_planes(
    experts: int, block: BlockGeometry, planes: int, poison: bool, gen: torch.Generator
) -> torch.Tensor:
    """int32 [planes, E, R, C, 32], expert by expert so that one expert's codes are in memory."""
    size = (block.padded_rows, block.padded_cols)
    tiles = (planes, experts, block.row_tiles, block.col_tiles, 32)
    out = torch.empty(tiles, dtype=torch.int32, device=gen.device)
    for expert in range(experts):
        codes = torch.randint(
            0, 1 << planes, size, dtype=torch.uint8, generator=gen, device=gen.device
        )
        if not poison:
            codes[row_padding(block, gen.device)] = 0
            codes[:, block.cols :] = 0
        out[:, expert] = pack_padded(codes, block, planes)
    return out


def _random_table(
    block: BlockGeometry, bits: int, dtype: torch.dtype, poison: bool, gen: torch.Generator
) -> torch.Tensor:
    """[padded N, 2^bits] centroids, ascending in a row as the quantizer leaves them."""
    size = (block.padded_rows, 1 << bits)
    values = torch.randn(size, generator=gen, device=gen.device) * block.cols**-0.5
    values = values.sort(dim=1).values
    values[row_padding(block, gen.device)] = float("nan") if poison else 0.0
    return values.to(dtype)


def _fill(
    bits: torch.Tensor,
    words: tuple[torch.Tensor, ...],
    tables: list[list[torch.Tensor]],
    garbage: tuple[torch.Tensor, ...],
    poison: bool,
) -> BlockTable:
    """Addresses of planes and tables; unread planes point at garbage, or at themselves."""
    experts, planes = words[0].shape[1], words[0].shape[0]
    addresses = torch.zeros((experts, len(KINDS), MAX_BITS), dtype=torch.int64)
    table_addresses = torch.zeros((experts, len(KINDS)), dtype=torch.int64)
    for expert in range(experts):
        for kind in range(len(KINDS)):
            table_addresses[expert, kind] = tables[expert][kind].data_ptr()
            read = int(bits[expert, kind]) if poison else planes
            for plane in range(MAX_BITS):
                at = words[kind][plane, expert] if plane < read else garbage[kind]
                addresses[expert, kind, plane] = at.data_ptr()
    device = words[0].device
    return BlockTable(bits.to(device), addresses.to(device), table_addresses.to(device))


def random_routing(
    tokens: int,
    experts: int,
    top_k: int,
    routing: Routing = "uniform",
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights float32 [T, k], rows summing to 1, and int32 ids [T, k], distinct in a row.

    uniform: every expert alike. zipf: expert e is drawn in proportion to 1 / (e + 1). hot: the
    first choice is always expert 0, the others are uniform (top_k 1: one expert gets everything).
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"{top_k} choices of {experts} experts")
    gen = generator if generator is not None else torch.Generator(device).manual_seed(0)
    score = torch.rand((tokens, experts), generator=gen, device=device)
    score = -torch.log(-torch.log(score.clamp(1e-12, 1 - 1e-7)))  # Gumbel: top-k draws by weight
    if routing == "zipf":
        score -= torch.log(torch.arange(1, experts + 1, device=device, dtype=torch.float32))
    elif routing == "hot":
        score[:, 0] = float("inf")
    ids = score.topk(top_k, dim=1).indices.to(torch.int32)
    logits = torch.randn((tokens, top_k), generator=gen, device=device)
    return torch.softmax(logits, dim=1), ids
