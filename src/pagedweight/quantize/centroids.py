"""Leaf sums to lookup tables: one table of rounded, ascending, finite centroids per level."""

from __future__ import annotations

from collections.abc import Sequence

import torch

TORCH_DTYPE: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def level_tables(
    leaf_weight: torch.Tensor,
    leaf_moment: torch.Tensor,
    levels: Sequence[int],
    dtype: torch.dtype,
) -> dict[int, torch.Tensor]:
    """Tables {b: [N, 2^b] of `dtype`} from the leaves' sums of w and of w x, float64 [N, 2^P].

    A cluster of level b is 2^(P-b) neighbouring leaves, so its sums are theirs. An empty cluster
    repeats the centroid before it: the first leaf is never empty. The nearest representable value
    to the mean is the best centroid there is, the error being a parabola around the mean.
    """
    tables = {}
    top = leaf_weight.shape[1].bit_length() - 1
    for level in range(top, min(levels) - 1, -1):
        if level in levels:
            filled = leaf_weight > 0
            mean = leaf_moment / torch.where(filled, leaf_weight, 1.0)
            mean = torch.where(filled, mean, -torch.inf).cummax(dim=1).values
            tables[level] = mean.to(torch.float32).to(dtype)
        leaf_weight = leaf_weight.unflatten(1, (-1, 2)).sum(2)
        leaf_moment = leaf_moment.unflatten(1, (-1, 2)).sum(2)
    return {level: tables[level] for level in levels}
