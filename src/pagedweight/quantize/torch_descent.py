"""Compensated codes as batched tensor operations, for a GPU (and the CPU, where it is tested).

All rows of all experts of a batch go through the columns together. [E, N, K] weights, [E, K, K]
products; a level's error times the product is computed for a block of columns at a time, and kept
up to date within the block only: that is K / BLOCK matrix products a pass and no tensor larger
than the weights.
"""

from __future__ import annotations

import torch

from pagedweight.quantize.refit import Systems

BLOCK = 64
"""Columns between two matrix products."""


def descend(
    weights: torch.Tensor,
    product: torch.Tensor,
    tables: list[torch.Tensor],
    pull: torch.Tensor,
    trust: torch.Tensor,
    codes: torch.Tensor,
    passes: int,
) -> None:
    """Improve codes in place, one column after the other, with tables as they are.

    weights float32 [E, N, K]; product float32 [E, K, K], positive definite; tables by level,
    float32 [E, N, 2^b]; pull float32 [E, levels]; trust float32 [levels]; codes uint8 [E, N, K].
    With D_b = W_b - W, each step takes the code of a column that minimizes, for its row d_b of D_b,

        sum over levels b of pull_b (d_b H_b d_b^T),    H_b = trust_b H + (1 - trust_b) diag H

    with all other columns fixed: the centroids nearest to w_b,c - (d_b H_b)_c / H_cc.
    """
    for _ in range(passes):
        for start in range(0, weights.shape[2], BLOCK):
            columns = slice(start, min(start + BLOCK, weights.shape[2]))
            _descend_block(weights, product, tables, pull, trust, codes, columns)


def _descend_block(
    weights: torch.Tensor,
    product: torch.Tensor,
    tables: list[torch.Tensor],
    pull: torch.Tensor,
    trust: torch.Tensor,
    codes: torch.Tensor,
    columns: slice,
) -> None:
    gradient = _gradient(weights, product, tables, trust, codes, columns)
    for place, c in enumerate(range(columns.start, columns.stop)):
        old, curve = codes[:, :, c], product[:, c, c][:, None]
        here = _centroids(tables, old)
        cost = None
        for level, table in enumerate(tables):
            target = here[level] - gradient[:, :, level, place] / curve
            own = pull[:, level, None, None] * (table - target[:, :, None]).square()
            cost = own if cost is None else own + cost.repeat_interleave(2, dim=2)
        assert cost is not None  # there is at least one level
        codes[:, :, c] = cost.argmin(2).to(torch.uint8)
        step = torch.stack(_centroids(tables, codes[:, :, c]), 2) - torch.stack(here, 2)
        believed = step * trust
        gradient += believed[..., None] * product[:, None, None, c, columns]
        gradient[:, :, :, place] += (step - believed) * curve[..., None]


def systems(
    weights: torch.Tensor,
    product: torch.Tensor,
    tables: list[torch.Tensor],
    trust: torch.Tensor,
    codes: torch.Tensor,
) -> Systems:
    """What `refit` solves; arguments as for `descend`. Its largest temporary: E N 2^P K floats."""
    every = slice(0, weights.shape[2])
    gradient = _gradient(weights, product, tables, trust, codes, every)
    member = torch.nn.functional.one_hot(codes.long(), tables[-1].shape[2]).mT.float()
    by_leaf = (member.flatten(1, 2) @ product).reshape(member.shape)
    mass = (member @ product.diagonal(dim1=1, dim2=2)[:, None, :, None])[..., 0]
    return Systems((by_leaf @ member.mT).double(), mass.double(), (gradient @ member.mT).double())


def _gradient(
    weights: torch.Tensor,
    product: torch.Tensor,
    tables: list[torch.Tensor],
    trust: torch.Tensor,
    codes: torch.Tensor,
    columns: slice,
) -> torch.Tensor:
    """The `columns` of (W_b - W) H_b at every level, float32 [E, n, levels, columns]."""
    found, diagonal = [], product.diagonal(dim1=1, dim2=2)[:, None, columns]
    for level, table in enumerate(tables):
        code = (codes >> (len(tables) - 1 - level)).long()
        apart = table.gather(2, code) - weights
        alone = apart[:, :, columns] * diagonal
        found.append(torch.lerp(alone, apart @ product[:, :, columns], trust[level]))
    return torch.stack(found, 2)


def _centroids(tables: list[torch.Tensor], codes: torch.Tensor) -> list[torch.Tensor]:
    """Every level's centroid for one column's codes [E, N]: levels of [E, N]."""
    top = len(tables) - 1
    return [
        table.gather(2, (codes >> (top - level)).long()[:, :, None])[:, :, 0]
        for level, table in enumerate(tables)
    ]
