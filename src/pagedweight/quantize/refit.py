"""Best tables for given codes under a second moment: one small linear system a row and level.

With C [K, 2^b] the indicators of a row's clusters and d = C t - w its error, the table t that
minimizes d H_b d^T moves by the solution of

    (C^T H_b C) step = -C^T H_b d,        H_b = trust_b H + (1 - trust_b) diag H.

A cluster of a level is 2^(P-b) neighbouring leaves, so its system is the leaves' with neighbours
added up: the sums over columns are made once, for the highest level P.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Systems(NamedTuple):
    """Sums over a row's columns by leaf, float64.

    matrix: C^T H C, [..., 2^P, 2^P]. mass: C^T diag H, [..., 2^P]. slope: C^T H_b d of every level,
    [..., levels, 2^P].
    """

    matrix: torch.Tensor
    mass: torch.Tensor
    slope: torch.Tensor

    def merged(self) -> Systems:
        """Of the level below: neighbours added up."""
        return Systems(
            self.matrix.unflatten(-1, (-1, 2)).sum(-1).unflatten(-2, (-1, 2)).sum(-2),
            self.mass.unflatten(-1, (-1, 2)).sum(-1),
            self.slope.unflatten(-1, (-1, 2)).sum(-1),
        )


def refit(
    tables: list[torch.Tensor], systems: Systems, trust: torch.Tensor, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The exact minimizer of every level, rounded to `dtype`, as float32; tables [..., 2^b].

    trust: float [levels]. An empty cluster keeps its centroid. So does everything in a row whose
    system has a step that `dtype` cannot hold.
    """
    fitted: list[torch.Tensor] = []
    for level in range(len(tables) - 1, -1, -1):
        table = tables[level]
        if level < len(tables) - 1:
            systems = systems.merged()
        believed = trust[level].double()
        matrix = systems.matrix * believed
        matrix.diagonal(dim1=-2, dim2=-1).add_(systems.mass * (1 - believed))
        step = _solve(matrix, systems.slope[..., level, :])
        new = (table.double() - step).float().to(dtype).float()
        sound = torch.isfinite(new).all(-1, keepdim=True)
        fitted.insert(0, torch.where(sound, new, table))
    return fitted


def _solve(matrix: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """matrix^-1 slope of each row, 0 where a cluster is empty (its row and column are zero)."""
    empty = matrix.diagonal(dim1=-2, dim2=-1) <= 0
    whole = matrix + torch.diag_embed(empty.double())
    factor, _ = torch.linalg.cholesky_ex(whole)
    return torch.cholesky_solve(slope.masked_fill(empty, 0.0)[..., None], factor)[..., 0]
