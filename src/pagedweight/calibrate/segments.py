"""Runtime signals of calibration text: the quantities that kernels add up, by segment."""

from __future__ import annotations

import torch

from pagedweight.calibrate.experts import ExpertCall
from pagedweight.calibrate.measurements import SEGMENTS
from pagedweight.core.geometry import KINDS, LayerShape


def segment_of(token: torch.Tensor, length: int) -> torch.Tensor:
    """Segment of each position in a sequence of `length` tokens, int64."""
    return token * SEGMENTS // length


def segment_lengths(length: int) -> list[int]:
    """Tokens of every segment."""
    of = segment_of(torch.arange(length), length)
    return torch.bincount(of, minlength=SEGMENTS).tolist()


class SegmentSignals:
    """`LayerStats` (kernels/contract.py) of one layer for each segment: float32, on the device.

    Set `sequence` before the layer runs on it.
    """

    def __init__(
        self, shape: LayerShape, sequences: int, length: int, device: torch.device
    ) -> None:
        pieces = sequences * SEGMENTS
        self.length = length
        self.sequence = 0
        self.routed = torch.zeros((pieces, shape.experts), device=device)
        self.mass = torch.zeros((pieces, shape.experts), device=device)
        self.features = torch.zeros((pieces, shape.experts, len(KINDS), 3), device=device)

    def visit(self, call: ExpertCall) -> None:
        """Add one linear block's tokens: r, r|x|, r|x|^2; raise max |x|."""
        piece = self.sequence * SEGMENTS + segment_of(call.token, self.length)
        if call.kind == KINDS[0]:
            self.mass[:, call.expert].index_add_(0, piece, call.weights)
            self.routed[:, call.expert].index_add_(0, piece, torch.ones_like(call.weights))
        norm = call.inputs.norm(dim=1)
        of = self.features[:, call.expert, KINDS.index(call.kind)]
        of[:, 0].index_add_(0, piece, call.weights * norm)
        of[:, 1].index_add_(0, piece, call.weights * norm * norm)
        of[:, 2].scatter_reduce_(0, piece, norm, "amax")
