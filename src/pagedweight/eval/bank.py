"""The routed experts at every stored level, dequantized once: choosing bits is then picking a view.

Weights stay in 16 bits (tables hold 16-bit centroids, so nothing is lost) and widen when they are
used; the source's own experts, where there is a source, are one more level.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import KINDS
from pagedweight.kernels.reference.bits import logical, unpack_padded

SOURCE = 0
"""The level of the source's own weights; stored levels are their bits."""


@dataclass(frozen=True, eq=False)
class WeightBank:
    """weights[layer position][kind][level]: [E, N, K]; level is bits, or SOURCE."""

    weights: tuple[tuple[dict[int, torch.Tensor], ...], ...]

    @staticmethod
    def of(checkpoint: Checkpoint, device: torch.device) -> WeightBank:
        """Dequantize every block at every level on `device`."""
        return WeightBank(
            tuple(
                tuple(_levels(checkpoint, pos, kind, device) for kind in range(len(KINDS)))
                for pos in range(len(checkpoint.moe_layers))
            )
        )

    def add_source(self, position: int, kind: int, weights: torch.Tensor) -> None:
        """The source's own experts of a layer [E, N, K]."""
        self.weights[position][kind][SOURCE] = weights

    @property
    def has_source(self) -> bool:
        return all(SOURCE in levels for layer in self.weights for levels in layer)


def _levels(
    checkpoint: Checkpoint, position: int, kind: int, device: torch.device
) -> dict[int, torch.Tensor]:
    block, views = checkpoint.shape.blocks[kind], checkpoint.layer(position)
    planes = torch.from_numpy(views.planes[KINDS[kind]].view(np.int32).copy()).to(device)
    dtype, top = getattr(torch, checkpoint.table_dtype), checkpoint.bits[-1]
    tables = {
        bits: torch.from_numpy(table.view(np.int16).copy()).to(device).view(dtype)
        for bits, table in views.tables[KINDS[kind]].items()
    }
    shape = (checkpoint.shape.experts, block.rows, block.cols)
    out = {bits: torch.empty(shape, dtype=dtype, device=device) for bits in checkpoint.bits}
    for expert in range(checkpoint.shape.experts):
        codes = unpack_padded(planes[:, expert], block).to(torch.int64)
        for bits, weights in out.items():
            # Codes are nested: the first b planes of a code are its upper b bits.
            found = torch.gather(tables[bits][expert], 1, codes >> (top - bits))
            weights[expert] = logical(found, block)
    return out
