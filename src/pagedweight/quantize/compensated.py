"""Codes whose errors cancel: nested codes fitted to the full second moment H = E[x x^T].

A block's output moves by dW x, so what its codes cost is E|dW x|^2 = tr(dW H dW^T), of which plain
codes see the diagonal only. Starting from those, two steps take turns, each of which can only lower

    sum over levels b of  (emphasis_b / loss_b of the plain codes) tr(dW_b H_b dW_b^T),
    H_b = trust_b H + (1 - trust_b) diag H:

a descent over codes, column by column (all levels decide together on the one nested code), and the
exact best tables of every level. Both are the alternating least squares of a nested codebook; the
descent is that of QuantEase (Behdin et al., arXiv:2309.01885) with a tree of levels in place of a
grid. Rows are independent. docs/codes.md has what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedweight.quantize import torch_descent
from pagedweight.quantize.centroids import TORCH_DTYPE
from pagedweight.quantize.refit import refit
from pagedweight.quantize.rows import Backend, RowCodes, raw_tables

DAMPING = 0.01
"""Part of the mean E[x_c^2] that is added to every E[x_c^2]: directions that calibration did not
see still count, and H is positive definite."""
EMPHASIS = {2: 0.3, 3: 4.0}
"""How much a level's relative loss counts; the others 1. All levels share one code: 3 bits, where
plans begin, decide most, and 2 bits, the emergency level, least."""
TRUST = {4: 0.9, 5: 0.7}
"""trust_b, how much of the correlations a level believes: 1 below, 0.5 above. Finer codes fit the
noise of H further: believing all of it was worse at 6 bits on other text, and on its own text."""
ROUNDS = 2
"""Turns of descent and refit."""
PASSES = 2
"""Of the descent in a turn, over all columns."""

ROWS = 256
"""Rows that go through all turns together on the CPU."""
SYSTEM_ELEMENTS = 1 << 28
"""Floats of the largest temporaries of a refit on a GPU."""


@dataclass(frozen=True)
class Compensated:
    """Codes of one linear block.

    rows: codes, tables and, per row and level, d H d^T with H as measured. kept_plain: the plain
    codes were better at some level by that measure, and `rows` holds them.
    """

    rows: RowCodes
    kept_plain: bool


def fitting_product(product: torch.Tensor, tokens: int) -> torch.Tensor:
    """H to fit to, positive definite: E[x x^T] over `tokens`, float32 [K, K], drawn to its diagonal
    by as many tokens as there are columns, since that is what it takes to know it, and damped."""
    own = product.diagonal()
    drawn = product * (tokens / (tokens + len(product)))
    drawn.diagonal().copy_(own + DAMPING * own.mean())
    return drawn


def compensate(
    weights: torch.Tensor,
    products: torch.Tensor,
    tokens: Sequence[int],
    plain: Sequence[RowCodes],
    table_dtype: str,
    backend: Backend = "numba",
) -> list[Compensated]:
    """Improve the `plain` codes of E linear blocks of one shape.

    weights: float32 [E, N, K]. products: E[x x^T] of each block's inputs over its `tokens`,
    float32 [E, K, K], not zero. `backend` "numba" runs on the CPU, "torch" where weights live, all
    blocks together; the two differ in rounding, so in codes, but not in how good these are.
    """
    fit_to = torch.stack([fitting_product(h, n) for h, n in zip(products, tokens, strict=True)])
    levels = sorted(plain[0].tables)
    codes = torch.stack([torch.as_tensor(rows.codes) for rows in plain]).to(weights.device)
    tables = [
        torch.stack([_values(rows.tables[b], table_dtype) for rows in plain]).to(weights.device)
        for b in levels
    ]
    before = row_losses(weights, products, tables, codes)
    pull = _pull(weights, fit_to, tables, codes, levels)
    alternate = _alternate_numba if backend == "numba" else _alternate_torch
    trust = torch.tensor(
        [TRUST.get(b, 1.0 if b < min(TRUST) else 0.5) for b in levels], device=weights.device
    )
    dtype = TORCH_DTYPE[table_dtype]
    codes, tables = alternate(weights, fit_to, tables, pull, trust, codes, dtype)
    after = row_losses(weights, products, tables, codes)
    worse = (after.sum(1) > before.sum(1)).any(1).tolist()
    return [
        Compensated(RowCodes(rows.codes, rows.tables, _numpy(before[e])), True)
        if worse[e]
        else Compensated(
            _rows(codes[e], [t[e] for t in tables], after[e], levels, table_dtype), False
        )
        for e, rows in enumerate(plain)
    ]


def row_losses(
    weights: torch.Tensor, products: torch.Tensor, tables: list[torch.Tensor], codes: torch.Tensor
) -> torch.Tensor:
    """d H d^T of every row, float64 [E, N, levels]; never below 0."""
    found = []
    for level, table in enumerate(tables):
        code = (codes >> (len(tables) - 1 - level)).long()
        apart = table.gather(2, code) - weights
        with torch_descent.tensor_float():
            pulled = apart @ products
        found.append((pulled * apart).sum(2, dtype=torch.float64).clamp_(min=0.0))
    return torch.stack(found, 2)


def _pull(
    weights: torch.Tensor,
    products: torch.Tensor,
    tables: list[torch.Tensor],
    codes: torch.Tensor,
    levels: Sequence[int],
) -> torch.Tensor:
    """Each block's weight of each level, float32 [E, levels]: emphasis over the plain loss."""
    loss = row_losses(weights, products, tables, codes).sum(1)
    energy = (
        weights.double().square() @ products.diagonal(dim1=1, dim2=2).double()[..., None]
    ).sum((1, 2))
    loss = torch.maximum(loss, 1e-9 * energy[:, None]).clamp_(min=torch.finfo(torch.float32).tiny)
    emphasis = torch.tensor([EMPHASIS.get(b, 1.0) for b in levels], device=loss.device)
    pull = emphasis / loss
    return (pull / pull.amax(1, keepdim=True)).float()


def _alternate_torch(weights, products, tables, pull, trust, codes, dtype):
    experts, rows, cols = weights.shape
    step = max(1, SYSTEM_ELEMENTS // (experts * tables[-1].shape[2] * cols))
    halved = torch_descent.halves(products)
    for _ in range(ROUNDS):
        torch_descent.descend(weights, products, tables, pull, trust, codes, PASSES)
        parts = []
        for part in (slice(start, start + step) for start in range(0, rows, step)):
            own = [table[:, part] for table in tables]
            args = (weights[:, part], products, halved, own, trust, codes[:, part])
            parts.append(refit(own, torch_descent.systems(*args), trust, dtype))
        tables = [torch.cat(level, 1) for level in zip(*parts, strict=True)]
    return codes, tables


def _alternate_numba(weights, products, tables, pull, trust, codes, dtype):
    from pagedweight.quantize import numba_descent  # compiles on first use

    tables = [table.clone() for table in tables]
    experts, rows, _ = weights.shape
    for e, start in product(range(experts), range(0, rows, ROWS)):
        part = (e, slice(start, start + ROWS))
        w, c, own = weights[part], codes[part], [table[part] for table in tables]
        for _ in range(ROUNDS):
            numba_descent.descend(w, products[e], own, pull[e], trust, c, PASSES)
            systems = numba_descent.systems(w, products[e], own, trust, c)
            own = refit(own, systems, trust, dtype)
        for table, fitted in zip(tables, own, strict=True):
            table[part] = fitted
    return codes, tables


def _values(table: npt.NDArray[np.uint16], dtype: str) -> torch.Tensor:
    """float32 centroids of raw bit patterns."""
    return torch.from_numpy(table.view(np.int16)).view(TORCH_DTYPE[dtype]).float()


def _rows(
    codes: torch.Tensor,
    tables: list[torch.Tensor],
    losses: torch.Tensor,
    levels: Sequence[int],
    dtype: str,
) -> RowCodes:
    raw = raw_tables({b: t.to(TORCH_DTYPE[dtype]) for b, t in zip(levels, tables, strict=True)})
    return RowCodes(codes if codes.is_cuda else _numpy(codes), raw, _numpy(losses))


def _numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return tensor.cpu().numpy()
