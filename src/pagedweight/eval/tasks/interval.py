"""How sure a mean over items is."""

from __future__ import annotations

import math

import numpy as np

from pagedweight.eval.statistics import Estimate, Floats, bootstrap

_Z = 1.959964
"""The normal quantile of a 95% interval."""


def interval(values: Floats, seed: int) -> Estimate:
    """Mean of scores [items] and its 95% interval.

    Where every item is right or wrong, Wilson's score interval (1927): resampling ten wrong answers
    would say that no right one can ever come. Else the bootstrap.
    """
    if not np.isin(values, (0.0, 1.0)).all():
        return bootstrap(values, seed)
    count, mean = len(values), float(values.mean())
    spread = _Z * math.sqrt(mean * (1 - mean) / count + (_Z / (2 * count)) ** 2)
    middle, scale = mean + _Z**2 / (2 * count), 1 + _Z**2 / count
    low, high = ((middle + sign * spread) / scale for sign in (-1, 1))
    return Estimate(mean, max(0.0, min(low, mean)), min(1.0, max(high, mean)))
