"""The optimum that the row quantizer is measured against: the textbook dynamic program, float64.

O(clusters n^2) for each row, every last cut tried for every prefix: no monotonicity, no divide and
conquer, nothing in common with the quantizer but the definition of the error.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt


@numba.njit(parallel=True, cache=True)
def _layer(
    before: npt.NDArray[np.float64],
    sums: npt.NDArray[np.float64],
    after: npt.NDArray[np.float64],
) -> None:
    """after[j] = min over i of before[i] + error of the cluster [i, j)."""
    for j in numba.prange(before.size):
        best = before[j]
        for i in range(j):
            weight = sums[0, j] - sums[0, i]
            moment = sums[1, j] - sums[1, i]
            value = before[i] + sums[2, j] - sums[2, i] - moment * moment / weight
            if value < best:
                best = value
        after[j] = best


def optimal_errors(
    row: npt.NDArray[np.float32], importance: npt.NDArray[np.float64], clusters: int
) -> npt.NDArray[np.float64]:
    """Least weighted squared error of one row with 1, 2, ... `clusters` clusters, [clusters].

    Centroids are exact means. importance: float64 [K], positive.
    """
    x = row.astype(np.float64)
    x -= np.average(x, weights=importance)
    values, place = np.unique(x, return_inverse=True)
    weight = np.bincount(place, weights=importance)
    terms = np.stack([weight, weight * values, weight * values**2])
    sums = np.concatenate([np.zeros((3, 1)), terms.cumsum(axis=1)], axis=1)
    before = np.full(len(values) + 1, np.inf)
    before[0] = 0.0
    after, found = np.empty_like(before), np.empty(clusters)
    for count in range(clusters):
        _layer(before, sums, after)
        before, after = after.copy(), after
        found[count] = max(before[-1], 0.0)
    return found
