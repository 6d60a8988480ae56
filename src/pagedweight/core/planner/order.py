"""The first steps of an order without sorting all of it.

Integer keys are binned by their upper half (for floats: exponent and 7 bits of mantissa), bins are
added up, and only the bins around the cut are sorted. The result is that of a full sort by
(key, row, nearest step first).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.size_table import FloatArray, IntArray

Keys = NDArray[np.int32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Bins:
    """Bin of every step, int64 [T, rows] starting at 0; made once for a set of keys."""

    of: IntArray
    count: int

    @staticmethod
    def of_keys(keys: Keys) -> Bins:
        coarse = keys >> 16
        low = int(coarse.min())
        return Bins(np.subtract(coarse, low, dtype=np.int64), int(coarse.max()) - low + 1)


@dataclass(frozen=True, eq=False)
class Cut:
    """A prefix of the order: `whole` steps are all in it, `edge` steps may be, in this order.

    whole: bool [T, rows]; steps, rows: int64 [m], the sorted edge.
    """

    whole: Mask
    steps: IntArray
    rows: IntArray


@dataclass(frozen=True)
class Span:
    """Where to cut, in running weight: sure below `least`, over beyond `most`."""

    least: float
    most: float


def cut(
    keys: Keys, bins: Bins, legal: Mask, weights: FloatArray | None, span: Span, down: bool
) -> Cut:
    """The legal steps whose running weight ends below `span.least`, then those up to `span.most`.

    weights: [T, rows], None counts steps. Steps beyond the bin that reaches `most` are left out.
    down:    whether a row's highest step is its nearest (offload) or its lowest (restore).
    """
    used = legal.astype(np.float64) if weights is None else weights * legal
    mass = np.bincount(bins.of.ravel(), weights=used.ravel(), minlength=bins.count)
    running = np.cumsum(mass)
    first = int(np.searchsorted(running, span.least))
    last = int(np.searchsorted(running, span.most))
    whole = legal & (bins.of < first)
    edge = legal & ~whole
    if last < bins.count:
        edge &= bins.of <= last
    flat = np.flatnonzero(edge)
    steps, rows = np.divmod(flat, keys.shape[1])
    order = np.lexsort((-steps if down else steps, rows, keys.ravel()[flat]))
    return Cut(whole, steps[order], rows[order])
