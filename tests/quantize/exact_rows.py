"""Brute force and textbook references that the row quantizer is checked against."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.float64]


def cluster_error(x: Array, h: Array) -> float:
    """Weighted squared distance to the weighted mean."""
    return float((h * (x - np.average(x, weights=h)) ** 2).sum())


def best_clusters(x: Array, h: Array, clusters: int) -> float:
    """Least error of `clusters` clusters by trying every way to cut the sorted values."""
    order = np.argsort(x)
    x, h = x[order], h[order]
    clusters = min(clusters, len(x))
    least = np.inf
    for cuts in combinations(range(1, len(x)), clusters - 1):
        edges = (0, *cuts, len(x))
        least = min(least, sum(cluster_error(x[a:b], h[a:b]) for a, b in pairwise(edges)))
    return least


def codes_error(x: Array, h: Array, codes: npt.NDArray[np.integer]) -> float:
    """Error of a clustering with unrounded centroids."""
    return sum(cluster_error(x[codes == code], h[codes == code]) for code in np.unique(codes))


def values(table: npt.NDArray[np.uint16], dtype: str) -> npt.NDArray[np.float32]:
    """The numbers of a table of bit patterns."""
    patterns = torch.from_numpy(table.view(np.int16).copy())
    return patterns.view(getattr(torch, dtype)).float().numpy()
