"""The row quantizer on the CPU: exact seed and exact splits, one row at a time, rows in parallel.

A row's distinct values x_0 < x_1 < ... carry the summed importance w of their columns. With the
prefix sums S0 of w and S1 of w (x - mean), a cluster of values [i, j) has squared error

    sum w (x - mean)^2  -  G(i, j),      G(i, j) = (S1[j] - S1[i])^2 / (S0[j] - S0[i])

and the first term does not depend on the clusters, so the best clustering maximizes the sum of G.
-G is a Monge cost: the best last cut moves right with the end of the prefix, which lets divide and
conquer find a layer of the dynamic program in O(n log n) (Groenlund et al., arXiv:1701.07204).
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

_DIGIT_BITS = 11
_DIGITS = 1 << _DIGIT_BITS


@numba.njit(cache=True)
def _sorted_order(bits, keys, order, keys_to, order_to, counts):
    """Stable radix sort of one row by value; `bits` uint32 [K] are float32 patterns.

    Returns the column numbers by ascending value, int64 [K]: one of the scratch arrays. A digit
    that is the same in all keys is skipped: weights from 16-bit floats need two passes of three.
    """
    n = bits.size
    for c in range(n):
        raw = np.int64(bits[c])
        keys[c] = (raw ^ 0xFFFFFFFF) if raw >> 31 else (raw | 0x80000000)
        order[c] = c
    for shift in range(0, 32, _DIGIT_BITS):
        counts[:] = 0
        for c in range(n):
            counts[(keys[c] >> shift) & (_DIGITS - 1)] += 1
        if counts[(keys[0] >> shift) & (_DIGITS - 1)] == n:
            continue
        total = 0
        for digit in range(_DIGITS):
            here = counts[digit]
            counts[digit] = total
            total += here
        for c in range(n):
            digit = (keys[c] >> shift) & (_DIGITS - 1)
            place = counts[digit]
            counts[digit] = place + 1
            keys_to[place] = keys[c]
            order_to[place] = order[c]
        keys, keys_to = keys_to, keys
        order, order_to = order_to, order
    return order


@numba.njit(cache=True)
def _distinct(row, importance, order, first, s0, s1):
    """Merge equal values and fill the prefix sums; returns the number m of distinct values.

    first int64 [K+1]: value d holds sorted places first[d]..first[d+1]. s0, s1 float64 [K+1].
    """
    n = row.size
    weight, moment = 0.0, 0.0
    for c in range(n):
        weight += importance[c]
        moment += importance[c] * row[c]
    mean = moment / weight
    m = 0
    s0[0] = 0.0
    s1[0] = 0.0
    for place in range(n):
        c = order[place]
        if place == 0 or row[c] != row[order[place - 1]]:
            first[m] = place
            m += 1
            s0[m] = s0[m - 1]
            s1[m] = s1[m - 1]
        s0[m] += importance[c]
        s1[m] += importance[c] * (row[c] - mean)
    first[m] = n
    return m


@numba.njit(cache=True)
def _gain(s0, s1, i, j):
    s = s1[j] - s1[i]
    return s * s / (s0[j] - s0[i])


@numba.njit(cache=True)
def _best_cut(before, s0, s1, lo, hi, j):
    """(cut, value) of the best last cut i in [lo, hi] of the prefix [0, j), leftmost on a tie."""
    best, at = -1.0, lo
    for i in range(lo, hi + 1):
        value = before[i] + _gain(s0, s1, i, j)
        if value > best:
            best, at = value, i
    return at, best


@numba.njit(cache=True)
def _push(stack, depth, start, stop, lo, hi):
    stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3] = start, stop, lo, hi


@numba.njit(cache=True)
def _next_layer(before, after, cuts, s0, s1, clusters, m, stack):
    """One layer of the dynamic program: best gain of every prefix [0, j) in `clusters` clusters.

    `before` holds the layer of one cluster fewer. Writes after[j] and the last cut cuts[j] for j in
    clusters..m. `stack` int64 [64, 4] holds the open halves (from, to, lowest and highest cut).
    """
    depth = 1
    _push(stack, 0, clusters, m, clusters - 1, m - 1)
    while depth:
        depth -= 1
        start, stop, lo, hi = stack[depth, 0], stack[depth, 1], stack[depth, 2], stack[depth, 3]
        middle = (start + stop) >> 1
        cut, value = _best_cut(before, s0, s1, lo, min(hi, middle - 1), middle)
        after[middle] = value
        cuts[middle] = cut
        if start < middle:
            _push(stack, depth, start, middle - 1, lo, cut)
            depth += 1
        if middle < stop:
            _push(stack, depth, middle + 1, stop, cut, hi)
            depth += 1


@numba.njit(cache=True)
def _seed(bounds, stride, s0, s1, m):
    """Optimal clusters of the seed level: bounds[t * stride] is where cluster t begins.

    With no more distinct values than clusters each value is its own and the rest stay empty.
    """
    clusters = (bounds.size - 1) // stride
    if m <= clusters:
        for t in range(clusters + 1):
            bounds[t * stride] = min(t, m)
        return
    before, after = np.empty(m + 1), np.empty(m + 1)
    cuts = np.empty((clusters, m + 1), np.int32)
    stack = np.empty((64, 4), np.int64)
    for j in range(1, m + 1):
        before[j] = _gain(s0, s1, 0, j)
    for layer in range(2, clusters):
        _next_layer(before, after, cuts[layer], s0, s1, layer, m, stack)
        before, after = after, before
    bounds[clusters * stride] = m
    cut, _ = _best_cut(before, s0, s1, clusters - 1, m - 1, m)
    for layer in range(clusters - 1, -1, -1):
        bounds[layer * stride] = cut
        cut = cuts[layer, cut] if layer > 1 else 0


@numba.njit(cache=True)
def _split(s0, s1, start, stop):
    """Best two-way cut of the values [start, stop); `stop` when there is nothing to cut."""
    if stop - start < 2:
        return stop
    weight = s0[stop] - s0[start]
    mean = (s1[stop] - s1[start]) / weight
    best, at = -1.0, start + 1
    for p in range(start + 1, stop):
        left = s0[p] - s0[start]
        apart = (s1[p] - s1[start]) - mean * left
        value = apart * apart / (left * (weight - left))
        if value > best:
            best, at = value, p
    return at


@numba.njit(cache=True)
def _fit_row(row, importance, seed_bits, codes, leaf_weight, leaf_moment):
    """`fit_rows` for one row: row float32 [K], codes uint8 [K], leaf sums float64 [leaves]."""
    leaves = leaf_weight.size
    ints = np.empty((5, row.size + 1), np.int64)
    s0, s1 = np.empty(row.size + 1), np.empty(row.size + 1)
    first, counts = ints[4], np.empty(_DIGITS, np.int64)
    order = _sorted_order(row.view(np.uint32), ints[0], ints[1], ints[2], ints[3], counts)
    m = _distinct(row, importance, order, first, s0, s1)
    bounds = np.empty(leaves + 1, np.int64)
    stride = leaves >> seed_bits
    _seed(bounds, stride, s0, s1, m)
    while stride > 1:
        half = stride >> 1
        for t in range(0, leaves, stride):
            bounds[t + half] = _split(s0, s1, bounds[t], bounds[t + stride])
        stride = half
    for leaf in range(leaves):
        weight, moment = 0.0, 0.0
        for place in range(first[bounds[leaf]], first[bounds[leaf + 1]]):
            c = order[place]
            codes[c] = leaf
            weight += importance[c]
            moment += importance[c] * row[c]
        leaf_weight[leaf] = weight
        leaf_moment[leaf] = moment


@numba.njit(cache=True)
def _of_row(importance, r):
    return importance[0] if importance.shape[0] == 1 else importance[r]


@numba.njit(parallel=True, cache=True)
def fit_rows(weights, importance, seed_bits, codes, leaf_weight, leaf_moment):
    """Nested codes of every row, and what the centroids need.

    weights float32 [N, K]; importance float64 [1 or N, K], all positive. Writes codes uint8 [N, K]
    and per leaf cluster the summed importance w and sum of w x, float64 [N, leaves].
    """
    for r in numba.prange(weights.shape[0]):
        h = _of_row(importance, r)
        _fit_row(weights[r], h, seed_bits, codes[r], leaf_weight[r], leaf_moment[r])


@numba.njit(parallel=True, cache=True)
def row_errors(weights, importance, codes, shift, table, out):
    """out[r] = sum over c of importance (W - table[code >> shift])^2, in float64.

    table float32 [N, 2^b]; out float64 [N]; the rest as for `fit_rows`.
    """
    for r in numba.prange(weights.shape[0]):
        h = _of_row(importance, r)
        total = 0.0
        for c in range(weights.shape[1]):
            apart = np.float64(weights[r, c]) - np.float64(table[r, codes[r, c] >> shift])
            total += h[c] * apart * apart
        out[r] = total


def fit(
    weights: npt.NDArray[np.float32],
    importance: npt.NDArray[np.float64],
    seed_bits: int,
    top_bits: int,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(codes [N, K], leaf weights, leaf moments [N, 2^top_bits]); see `fit_rows`."""
    rows = weights.shape[0]
    codes = np.empty(weights.shape, np.uint8)
    leaf_weight = np.empty((rows, 1 << top_bits))
    leaf_moment = np.empty((rows, 1 << top_bits))
    fit_rows(weights, importance, seed_bits, codes, leaf_weight, leaf_moment)
    return codes, leaf_weight, leaf_moment
