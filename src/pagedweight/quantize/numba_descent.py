"""Compensated codes on the CPU: the descent over codes and the table systems, row by row.

Levels of a row lie one after the other: level number l (0 is the seed, of `seed_bits`) has its
2^(seed_bits + l) centroids at `(1 << (seed_bits + l)) - (1 << seed_bits)`. A code of the highest
level, shifted down, is the code of every level below it.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
import torch

from pagedweight.quantize.refit import Systems

_LOOSE = {"reassoc", "contract"}
"""Sums may be reordered, so that the loops vectorize; a build on one machine repeats to the bit."""


@numba.njit(cache=True, fastmath=_LOOSE)
def _choose(table, target, pull, seed_bits, cost):
    """The code with the least sum over levels of pull (centroid - target)^2, the lowest on a tie.

    A level's centroids add their cost to that of their parents, so all codes are tried at once.
    """
    start, parents = 0, 0
    for level in range(target.size):
        count = 1 << (seed_bits + level)
        for code in range(count):
            apart = table[start + code] - target[level]
            value = pull[level] * apart * apart
            if level:
                value += cost[parents + (code >> 1)]
            cost[start + code] = value
        parents = start
        start += count
    best = parents
    for place in range(parents, start):
        if cost[place] < cost[best]:
            best = place
    return best - parents


@numba.njit(cache=True)
def _centroid(table, code, level, levels, seed_bits):
    start = (1 << (seed_bits + level)) - (1 << seed_bits)
    return table[start + (code >> (levels - 1 - level))]


@numba.njit(cache=True, fastmath=_LOOSE)
def _descend_row(product, table, pull, trust, seed_bits, gradient, codes, passes):
    levels, cols = gradient.shape
    target, cost = np.empty(levels, np.float32), np.empty(table.size, np.float32)
    for _ in range(passes):
        changes = 0
        for c in range(cols):
            old, curve = codes[c], product[c, c]
            for level in range(levels):
                here = _centroid(table, old, level, levels, seed_bits)
                target[level] = here - gradient[level, c] / curve
            new = _choose(table, target, pull, seed_bits, cost)
            if new == old:
                continue
            codes[c] = new
            changes += 1
            for level in range(levels):
                here = _centroid(table, old, level, levels, seed_bits)
                step = _centroid(table, new, level, levels, seed_bits) - here
                if step != 0:
                    moved, column, believed = gradient[level], product[c], step * trust[level]
                    for k in range(cols):
                        moved[k] += believed * column[k]
                    moved[c] += (step - believed) * curve
        if changes == 0:
            return


@numba.njit(parallel=True, cache=True)
def _descend_rows(product, tables, pull, trust, seed_bits, gradient, codes, passes):
    for r in numba.prange(codes.shape[0]):
        table = tables[r]
        _descend_row(product, table, pull, trust, seed_bits, gradient[r], codes[r], passes)


@numba.njit(parallel=True, cache=True, fastmath=_LOOSE)
def _systems(product, codes, gradient, matrix, mass, slope):
    """Of each row C^T H C, C^T diag H and C^T gradient, C the columns' indicators of leaves."""
    leaves, cols = matrix.shape[1], codes.shape[1]
    for r in numba.prange(codes.shape[0]):
        by_leaf = np.zeros((leaves, cols), np.float32)
        for c in range(cols):
            into, column = by_leaf[codes[r, c]], product[c]
            for k in range(cols):
                into[k] += column[k]
        matrix[r] = 0
        mass[r] = 0
        slope[r] = 0
        for k in range(cols):
            mass[r, codes[r, k]] += product[k, k]
        for leaf in range(leaves):
            for k in range(cols):
                matrix[r, leaf, codes[r, k]] += by_leaf[leaf, k]
        for level in range(slope.shape[1]):
            for k in range(cols):
                slope[r, level, codes[r, k]] += gradient[r, level, k]


def descend(
    weights: torch.Tensor,
    product: torch.Tensor,
    tables: list[torch.Tensor],
    pull: torch.Tensor,
    trust: torch.Tensor,
    codes: torch.Tensor,
    passes: int,
) -> None:
    """`torch_descent.descend` for rows of one block: weights [n, K], product [K, K]; `codes` uint8
    [n, K] are changed in place."""
    _descend_rows(
        product.numpy(),
        torch.cat(tables, 1).numpy(),
        pull.numpy(),
        trust.numpy(),
        tables[0].shape[1].bit_length() - 1,
        _gradient(weights, product, tables, trust, codes),
        codes.numpy(),
        passes,
    )


def systems(
    weights: torch.Tensor,
    product: torch.Tensor,
    tables: list[torch.Tensor],
    trust: torch.Tensor,
    codes: torch.Tensor,
) -> Systems:
    """`torch_descent.systems` for rows of one block, without the leading E."""
    rows, leaves = tables[-1].shape
    matrix, mass = np.empty((rows, leaves, leaves)), np.empty((rows, leaves))
    slope = np.empty((rows, len(tables), leaves))
    gradient = _gradient(weights, product, tables, trust, codes)
    _systems(product.numpy(), codes.numpy(), gradient, matrix, mass, slope)
    return Systems(*map(torch.from_numpy, (matrix, mass, slope)))


def _gradient(
    weights: torch.Tensor,
    product: torch.Tensor,
    tables: list[torch.Tensor],
    trust: torch.Tensor,
    codes: torch.Tensor,
) -> npt.NDArray[np.float32]:
    """(W_b - W) H_b of every level, float32 [n, levels, K]."""
    out = torch.empty((len(weights), len(tables), weights.shape[1]))
    for level, table in enumerate(tables):
        code = (codes >> (len(tables) - 1 - level)).long()
        apart = table.gather(1, code) - weights
        out[:, level] = torch.lerp(apart * product.diagonal(), apart @ product, trust[level])
    return out.numpy()
