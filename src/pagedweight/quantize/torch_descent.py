"""Compensated codes as batched tensor operations, for a GPU (and the CPU, where they are tested).

All rows of all experts of a batch go through the columns together. [E, N, K] weights, [E, K, K]
products; the error of every level, [E, N, levels, K], is kept up to date, and its product with H is
computed for a block of columns at a time: K / BLOCK matrix products a pass. Within a block each
column waits for the ones before it. On a GPU one kernel does that (csrc/descend.cu), on the CPU a
loop of tensor operations with the same result but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagedweight.kernels.cuda.descend import COLUMNS, Descent, launch_descend
from pagedweight.quantize.refit import Systems

BLOCK = COLUMNS
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

    with all other columns fixed: the centroids nearest to w_b,c - (d_b H_b)_c / H_cc. On a GPU
    D_b H is a product of TensorFloat-32, whose rounding moves targets by far less than centroids
    lie apart.
    """
    apart = errors(weights, tables, codes)
    block = _kernel_block if weights.is_cuda else _torch_block
    for _ in range(passes):
        for start in range(0, weights.shape[2], BLOCK):
            columns = slice(start, min(start + BLOCK, weights.shape[2]))
            with tensor_float():
                pulled = (apart.flatten(1, 2) @ product[:, :, columns]).view(
                    *apart.shape[:3], columns.stop - start
                )
            block(weights, product, tables, pull, trust, codes, apart, pulled, columns)


def errors(weights: torch.Tensor, tables: list[torch.Tensor], codes: torch.Tensor) -> torch.Tensor:
    """W_b - W of every level, float32 [E, n, levels, K]."""
    experts, rows, cols = weights.shape
    out = torch.empty((experts, rows, len(tables), cols), device=weights.device)
    for level, table in enumerate(tables):
        code = (codes >> (len(tables) - 1 - level)).long()
        torch.sub(table.gather(2, code), weights, out=out[:, :, level])
    return out


@contextmanager
def tensor_float() -> Iterator[None]:
    """Products of float32 read 10 bits of each mantissa, on a GPU that can; none on the CPU.

    For products of errors with H: rounding then moves a row's loss by about 1e-4 of it.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _kernel_block(
    weights: torch.Tensor,
    product: torch.Tensor,
    tables: list[torch.Tensor],
    pull: torch.Tensor,
    trust: torch.Tensor,
    codes: torch.Tensor,
    apart: torch.Tensor,
    pulled: torch.Tensor,
    columns: slice,
) -> None:
    """`_torch_block` as one kernel; `codes`, `weights`, `product` must be contiguous."""
    experts, rows, cols = weights.shape
    joined = torch.cat(tables, 2)
    used = (codes, apart, pulled, product, weights, joined, pull, trust)
    if not all(tensor.is_contiguous() for tensor in used):
        raise ValueError("the descent kernel reads contiguous tensors")
    call = Descent(
        *(tensor.data_ptr() for tensor in used),
        rows=experts * rows,
        rows_of_expert=rows,
        cols=cols,
        start=columns.start,
        width=columns.stop - columns.start,
    )
    with torch.cuda.device(weights.device):
        launch_descend(
            torch.cuda.get_device_capability(),
            torch.cuda.get_device_name(),
            tables[0].shape[2].bit_length() - 1,
            len(tables),
            call,
            torch.cuda.current_stream().cuda_stream,
        )


def _torch_block(
    weights: torch.Tensor,
    product: torch.Tensor,
    tables: list[torch.Tensor],
    pull: torch.Tensor,
    trust: torch.Tensor,
    codes: torch.Tensor,
    apart: torch.Tensor,
    pulled: torch.Tensor,
    columns: slice,
) -> None:
    """Choose the codes of a block of columns; `codes` and `apart` change in these columns.

    pulled: D_b H in the block's columns as they were before it, float32 [E, N, levels, width].
    """
    curves = product.diagonal(dim1=1, dim2=2)[:, None, None, columns]
    gradient = _believed(pulled, apart[..., columns] * curves, trust)
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
        chosen = torch.stack(_centroids(tables, codes[:, :, c]), 2)
        believed = (chosen - torch.stack(here, 2)) * trust
        gradient += believed[..., None] * product[:, None, None, c, columns]
        apart[..., c] = chosen - weights[:, :, None, c]


def systems(
    weights: torch.Tensor,
    product: torch.Tensor,
    halved: torch.Tensor,
    tables: list[torch.Tensor],
    trust: torch.Tensor,
    codes: torch.Tensor,
) -> Systems:
    """What `refit` solves; arguments as for `descend`, `halved` as `halves` gives it. Its largest
    temporaries: some of E N 2^P K floats."""
    apart = errors(weights, tables, codes)
    diagonal = product.diagonal(dim1=1, dim2=2)[:, None, None]
    with tensor_float():
        gradient = (apart.flatten(1, 2) @ product).view(apart.shape)
    gradient = _believed(gradient, apart * diagonal, trust)
    leaves = torch.arange(tables[-1].shape[2], dtype=torch.uint8, device=codes.device)
    member = codes[:, :, None] == leaves[:, None]
    by_leaf = _by_leaf(member, halved)
    indicator = member.float()
    mass = (indicator @ diagonal.mT)[..., 0]
    matrix, slope = by_leaf @ indicator.mT, gradient @ indicator.mT
    return Systems(matrix.double(), mass.double(), slope.double())


def halves(product: torch.Tensor) -> torch.Tensor:
    """bfloat16 [E, 2 K, K]: above what bfloat16 holds of H, below what it holds of the rest. Their
    sum has 16 bits of H's mantissa."""
    high = product.bfloat16()
    return torch.cat([high, (product - high.float()).bfloat16()], 1)


def _by_leaf(member: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """C^T H: bool [E, n, 2^P, K] and `halves` of H to float32 [E, n, 2^P, K].

    Indicators are exact in any type, so this product of 2^P K^2 a row, which is most of the work of
    a refit, can be one of bfloat16 that adds in float32.
    """
    twice = torch.cat([member, member], 3).flatten(1, 2)
    if member.is_cuda:
        found = torch.bmm(twice.bfloat16(), product, out_dtype=torch.float32)
    else:
        found = twice.float() @ product.float()
    return found.view(member.shape)


def _believed(full: torch.Tensor, alone: torch.Tensor, trust: torch.Tensor) -> torch.Tensor:
    """D_b H_b [E, n, levels, columns] from D_b H and D_b diag H."""
    return torch.lerp(alone, full, trust[:, None])


def _centroids(tables: list[torch.Tensor], codes: torch.Tensor) -> list[torch.Tensor]:
    """Every level's centroid for one column's codes [E, N]: levels of [E, N]."""
    top = len(tables) - 1
    return [
        table.gather(2, (codes >> (top - level)).long()[:, :, None])[:, :, 0]
        for level, table in enumerate(tables)
    ]
