"""Per-expert statistics of routed tokens: what fits the codes, and the routing mass of eq. 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pagedweight.calibrate.experts import ExpertCall
from pagedweight.core.geometry import KINDS, LayerShape


@dataclass(frozen=True)
class LayerMoments:
    """One MoE layer. tokens: int64 [E]; mass: float32 [E]; second_moment by kind: float32 [E, K],
    E[x_c^2] over routed tokens, 1 where no token was routed (or every input was zero).
    product by kind, when asked for: float32 [E, K, K] on the device, E[x x^T], there the identity.
    """

    tokens: npt.NDArray[np.int64]
    mass: npt.NDArray[np.float32]
    second_moment: dict[str, npt.NDArray[np.float32]]
    product: dict[str, torch.Tensor] | None = None

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

    def __init__(self, shape: LayerShape, device: torch.device, products: bool = False) -> None:
        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        self.tokens = torch.zeros(shape.experts, dtype=torch.int64, device=device)
        self.mass = zeros(shape.experts)
        self.squares = {
            kind: zeros(shape.experts, block.cols)
            for kind, block in zip(KINDS, shape.blocks, strict=True)
        }
        self.products = {
            kind: torch.zeros((shape.experts, block.cols, block.cols), device=device)
            for kind, block in zip(KINDS, shape.blocks, strict=True)
            if products
        }

    def visit(self, call: ExpertCall) -> None:
        """Add the tokens of one linear block's call; mass and tokens once an expert."""
        if call.kind == KINDS[0]:
            self.tokens[call.expert] += len(call.weights)
            self.mass[call.expert] += call.weights.sum(dtype=torch.float64)
        self.squares[call.kind][call.expert] += call.inputs.square().sum(dim=0)
        if self.products:
            self.products[call.kind][call.expert].addmm_(call.inputs.T, call.inputs)

    def moments(self) -> LayerMoments:
        """The sums as means; an expert without tokens or signal falls back to ones."""
        second = {}
        for kind, squares in self.squares.items():
            mean = (squares / self.tokens.clamp(min=1)[:, None]).float()
            silent = (mean == 0).all(dim=1, keepdim=True)
            second[kind] = torch.where(silent, 1.0, mean).cpu().numpy()
            if self.products:
                product = self.products[kind].div_(self.tokens.clamp(min=1)[:, None, None])
                product.diagonal(dim1=1, dim2=2).add_(silent)
        total = self.mass.sum()
        mass = self.mass / torch.where(total > 0, total, 1.0)
        return LayerMoments(
            self.tokens.cpu().numpy(), mass.float().cpu().numpy(), second, self.products or None
        )
