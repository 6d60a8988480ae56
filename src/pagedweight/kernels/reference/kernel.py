"""The contract in plain torch: one expert after another, dequantize then multiply.

Slow and obviously right, on the CPU and on CUDA. The rounding it fixes for every kernel: gate and
up stay in float32, `act(gate) * up` is rounded once to x's dtype, down's output is weighted and
summed in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from pagedweight.core.geometry import DOWN, GATE_UP, LayerShape
from pagedweight.kernels.contract import Activation, BlockTable, LayerStats
from pagedweight.kernels.reference.bits import dequantize_block
from pagedweight.kernels.reference.memory import tensor_at


def activate(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The gate's activation, in the precision of `gate`. Raises ValueError for an unknown name."""
    if activation == "silu":
        return functional.silu(gate)
    if activation == "gelu":
        return functional.gelu(gate)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh")
    raise ValueError(f"activation {activation!r} is not one of silu, gelu, gelu_tanh")


def read_block(
    table: BlockTable,
    shape: LayerShape,
    expert: int,
    kind: int,
    table_dtype: torch.dtype,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Weights [N, K] of one linear block at its committed bits, read through its addresses."""
    block, device = shape.blocks[kind], table.planes.device
    bits = int(table.bits[expert, kind])
    tiles = (block.row_tiles, block.col_tiles, 32)
    words = torch.stack(
        [
            tensor_at(int(table.planes[expert, kind, p]), tiles, torch.int32, device)
            for p in range(bits)
        ]
    )
    rows = (block.padded_rows, 1 << bits)
    lut = tensor_at(int(table.tables[expert, kind]), rows, table_dtype, device)
    return dequantize_block(words, lut, block, dtype)


@dataclass(frozen=True)
class ReferenceKernel:
    """`MoEKernel` in torch. `dtype` is the precision of sums: float32, or float64 to judge others.

    `out` may then have any float dtype: with float64 the result is left unrounded.
    """

    dtype: torch.dtype = torch.float32

    def __call__(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shape: LayerShape,
        table: BlockTable,
        table_dtype: torch.dtype,
        activation: Activation,
        out: torch.Tensor,
        stats: LayerStats | None = None,
        num_tokens: torch.Tensor | None = None,
        beside: bool = False,
    ) -> None:
        total = torch.zeros(x.shape, dtype=self.dtype, device=x.device)
        real = x.shape[0] if num_tokens is None else int(num_tokens)
        for expert in range(shape.experts):
            token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
            if token.numel() == 0:
                continue
            rows = x[token].to(self.dtype)
            weight = topk_weights[token, choice].to(self.dtype)
            gate_up = self._read(table, shape, expert, GATE_UP, table_dtype)
            gate, up = (rows @ gate_up.T).split(shape.intermediate, dim=1)
            hidden = (activate(gate, activation) * up).to(x.dtype).to(self.dtype)
            down = self._read(table, shape, expert, DOWN, table_dtype)
            total.index_add_(0, token, weight[:, None] * (hidden @ down.T))
            if stats is not None:
                counted = token < real
                inputs = (rows[counted], hidden[counted])
                add_stats(stats, expert, weight[counted], inputs)
        out.copy_(total)

    def _read(
        self, table: BlockTable, shape: LayerShape, expert: int, kind: int, lut: torch.dtype
    ) -> torch.Tensor:
        return read_block(table, shape, expert, kind, lut, self.dtype)


def add_stats(
    stats: LayerStats, expert: int, weight: torch.Tensor, inputs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Add one expert's real tokens: routing weights [n] and the inputs [n, K] of each kind."""
    if weight.numel() == 0:
        return
    stats.mass[expert] += weight.sum().float()
    stats.tokens[expert] += weight.numel()
    for kind, rows in enumerate(inputs):
        norm = rows.norm(dim=1)
        feature = stats.features[expert, kind]
        feature[0] += (weight * norm).sum().float()
        feature[1] += (weight * norm * norm).sum().float()
        feature[2] = torch.maximum(feature[2], norm.max().float())
