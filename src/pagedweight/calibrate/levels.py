"""What a checkpoint's levels do to the source's weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagedweight.calibrate.experts import Weights
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import KINDS
from pagedweight.kernels.reference.bits import logical, unpack_padded


class LevelErrors:
    """W - W_b of one layer's linear blocks; planes are unpacked once for all levels."""

    def __init__(self, checkpoint: Checkpoint, layer_pos: int, weights: Weights) -> None:
        self._views = checkpoint.layer(layer_pos)
        self._blocks = dict(zip(KINDS, checkpoint.shape.blocks, strict=True))
        self._bits = checkpoint.bits
        self._dtype = getattr(torch, checkpoint.table_dtype)
        self._weights = weights

    def __call__(self, expert: int, kind: str, levels: Sequence[int] | None = None) -> torch.Tensor:
        """float32 [levels, N, K] on the weights' device; `levels` None: all of the checkpoint's."""
        weight = self._weights[expert, kind].float()
        block, top = self._blocks[kind], self._bits[-1]
        levels = self._bits if levels is None else levels
        planes = self._views.planes[kind][:, expert].view(np.int32).copy()
        codes = unpack_padded(torch.from_numpy(planes).to(weight.device), block)
        out = torch.empty((len(levels), *weight.shape), device=weight.device)
        for level, bits in enumerate(levels):
            raw = self._views.tables[kind][bits][expert].view(np.int16).copy()
            table = torch.from_numpy(raw).to(weight.device).view(self._dtype).float()
            # Codes are nested: the first b planes of a code are its upper b bits.
            values = table.gather(1, (codes >> (top - bits)).long())
            torch.sub(weight, logical(values, block), out=out[level])
        return out
