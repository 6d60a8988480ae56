"""Per-expert statistics of routed tokens: what fits the codes, and the routing mass of eq. 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagedweight.core.geometry import KINDS, LayerShape


@dataclass(frozen=True)
class LayerMoments:
    """One MoE layer. tokens: int64 [E]; mass: float32 [E]; second_moment by kind: float32 [E, K],
    E[x_c^2] over routed tokens, 1 where no token was routed (or every input was zero)."""

    tokens: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float32]
    second_moment: dict[str, npt.NDArray[np.float32]]

    @staticmethod
    def uniform(shape: LayerShape) -> LayerMoments:
        """What is known without calibration: nothing, every column counts the same."""
        widths = {kind: block.cols for kind, block in zip(KINDS, shape.blocks, strict=True)}
        return LayerMoments(
            tokens=np.zeros(shape.experts, np.int64),
            mass=np.zeros(shape.experts, np.float32),
            second_moment={
                kind: np.ones((shape.experts, width), np.float32) for kind, width in widths.items()
            },
        )


class MomentSums:
    """Running sums over the calibration tokens of one layer, float64 on the layer's device."""

    def __init__(self, shape: LayerShape, device: torch.device) -> None:
        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        self.tokens = torch.zeros(shape.experts, dtype=torch.int64, device=device)
        self.mass = zeros(shape.experts)
        self.squares = {
            kind: zeros(shape.experts, block.cols)
            for kind, block in zip(KINDS, shape.blocks, strict=True)
        }

    def route(self, expert: int, weights: torch.Tensor) -> None:
        """Tokens routed to `expert`, by their routing weights r, float [tokens]."""
        self.tokens[expert] += len(weights)
        self.mass[expert] += weights.sum(dtype=torch.float64)

    def add(self, kind: str, expert: int, inputs: torch.Tensor) -> None:
        """Input vectors of a linear block, float [tokens, K]."""
        self.squares[kind][expert] += inputs.square().sum(dim=0)

    def moments(self) -> LayerMoments:
        """The sums as means; an expert without tokens or signal falls back to ones."""
        second = {}
        for kind, squares in self.squares.items():
            mean = (squares / self.tokens.clamp(min=1)[:, None]).float()
            silent = (mean == 0).all(dim=1, keepdim=True)
            second[kind] = torch.where(silent, 1.0, mean).cpu().numpy()
        total = self.mass.sum()
        mass = self.mass / torch.where(total > 0, total, 1.0)
        return LayerMoments(self.tokens.cpu().numpy(), mass.float().cpu().numpy(), second)
