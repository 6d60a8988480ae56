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
class Order:
    """Steps in the order of integer keys of one sign.

    keys: int32 [T, rows]; bins: int16 [T, rows], their upper half from 0; count: bins there are.
    """

    keys: Keys
    bins: NDArray[np.int16]
    count: int

    @staticmethod
    def of_keys(keys: Keys) -> Order:
        low, high = int(keys.min()) >> 16, int(keys.max()) >> 16
        bins = ((keys >> 16) - np.int32(low)).astype(np.int16)
        return Order(keys, bins, high - low + 1)


@dataclass(frozen=True)
class Span:
    """Where to cut, in running weight: sure below `least`, over beyond `most`."""

    least: float
    most: float


@dataclass(frozen=True, eq=False)
class Cut:
    """A prefix of the order: `whole` steps are all in it, `edge` steps may be, in this order.

    whole: bool [T, rows]; steps, rows: int64 [m], the sorted edge.
    """

    whole: Mask
    steps: IntArray
    rows: IntArray


def cut(order: Order, legal: Mask, weights: FloatArray | None, span: Span, down: bool) -> Cut:
    """The legal steps whose running weight ends below `span.least`, then those up to `span.most`.

    weights: [T, rows], None counts steps. Steps beyond the bin that reaches `most` are left out.
    down:    whether a row's highest step is its nearest (offload) or its lowest (restore).
    """
    mass = np.zeros(order.count)
    for step, allowed in enumerate(legal):  # one level at a time: its arrays stay in the cache
        used = allowed if weights is None else weights[step] * allowed
        mass += np.bincount(order.bins[step], weights=used, minlength=order.count)
    running = np.cumsum(mass)
    first = int(np.searchsorted(running, span.least))
    last = int(np.searchsorted(running, span.most))
    whole = legal & (order.bins < first)
    edge = legal & ~whole
    if last < order.count:
        edge &= order.bins <= last
    flat = np.flatnonzero(edge)
    steps, rows = np.divmod(flat, order.keys.shape[1])
    nearest = -steps if down else steps
    sequence = np.lexsort((nearest, rows, order.keys.ravel()[flat]))
    return Cut(whole, steps[sequence], rows[sequence])
