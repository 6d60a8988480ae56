"""The row quantizer as batched tensor operations, for a GPU (and the CPU, where it is tested).

The same optimum as `numba_rows`, whose notation this file keeps: n rows at once, [n, K] tensors in
float64, no loop over rows, and every sum in a fixed order so that a run repeats to the bit. The
divide and conquer goes level by level: the middles of a level know their lowest and highest cut
from the levels above, so the candidates of a row are at most K plus one for each middle. On a GPU
one kernel has all of it (csrc/clusters.cu); here they are laid out one after the other and reduced
by segment, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pagedweight.kernels.cuda.clusters import Clusters, launch_clusters

CHUNK_ELEMENTS = 1 << 22
"""Weights handled at once; about 25 float64 or int64 tensors of this size live at the peak."""


@dataclass(frozen=True)
class _Sorted:
    """Rows by ascending value, and by distinct value. V is the largest number m of those.

    order, place: int64 [n, K], column and number of its distinct value, by rank. h, x: float64
    [n, K] by rank. m: int64 [n, 1]. ends: int64 [n, V + 1], ranks before value v; s0, s1: float64
    [n, V + 1], prefix sums before value v. All constant beyond m.
    """

    order: torch.Tensor
    place: torch.Tensor
    h: torch.Tensor
    x: torch.Tensor
    m: torch.Tensor
    ends: torch.Tensor
    s0: torch.Tensor
    s1: torch.Tensor


def _sort(weights: torch.Tensor, importance: torch.Tensor) -> _Sorted:
    values, order = torch.sort(weights, dim=1, stable=True)
    new = torch.ones_like(values, dtype=torch.bool)
    new[:, 1:] = values[:, 1:] != values[:, :-1]
    place = new.cumsum(1) - 1
    m = place[:, -1:] + 1
    h, x = importance.expand_as(weights).gather(1, order), values.double()
    mean = (h * x).sum(1, keepdim=True) / h.sum(1, keepdim=True)
    n, cols = weights.shape
    ends = torch.full((n, int(m.max()) + 1), cols, device=m.device)
    ends[:, 0] = 0
    rank = torch.arange(1, cols + 1, device=m.device).expand(n, -1)
    ends.scatter_reduce_(1, place + 1, rank, "amax", include_self=False)
    # Prefix sums read at the ends, rather than added up by value: a GPU adds in no fixed order.
    s0, s1 = (
        torch.nn.functional.pad(term.cumsum(1), (1, 0)).gather(1, ends)
        for term in (h, h * (x - mean))
    )
    return _Sorted(order, place, h, x, m, ends, s0, s1)


def _gain(s: _Sorted, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """G(i, j) at index tensors; 0 for a range without weight."""
    weight = s.s0.gather(1, j) - s.s0.gather(1, i)
    moment = s.s1.gather(1, j) - s.s1.gather(1, i)
    return torch.where(weight > 0, moment * moment / weight, 0.0)


def _first_best(
    value: torch.Tensor, at: torch.Tensor, segment: torch.Tensor, segments: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(best value, lowest `at` that has it) of every segment, each [n, segments]."""
    best = value.new_full((len(value), segments), -torch.inf)
    best.scatter_reduce_(1, segment, value, "amax")
    last = torch.iinfo(torch.int64).max
    where = torch.where(value == best.gather(1, segment), at, last)
    place = at.new_full((len(at), segments), last)
    return best, place.scatter_reduce_(1, segment, where, "amin")


def _best_cuts(
    s: _Sorted, before: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, j: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(value, cut) of the best last cut in [lo, hi] of each prefix [0, j); all int64 [n, q]."""
    count = hi - lo + 1
    stop = count.cumsum(1)
    candidate = torch.arange(int(stop[:, -1].max()), device=j.device).expand(len(j), -1)
    segment = torch.searchsorted(stop, candidate.contiguous(), right=True)
    spare = segment == j.shape[1]  # a row with fewer candidates than the longest
    segment = segment.clamp_(max=j.shape[1] - 1)
    cut = candidate - (stop - count - lo).gather(1, segment)
    cut = torch.minimum(cut, hi.gather(1, segment))
    value = before.gather(1, cut) + _gain(s, cut, j.gather(1, segment))
    value = value.masked_fill_(spare, -torch.inf)
    return _first_best(value, cut, segment, j.shape[1])


def _next_layer(
    s: _Sorted, before: torch.Tensor, clusters: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer of the dynamic program (`numba_rows._next_layer`): (after, cuts), [n, V + 1]."""
    n, size = before.shape
    after = torch.zeros_like(before)
    cuts = torch.zeros_like(before, dtype=torch.int64)
    step = 1 << (size - 1).bit_length()
    while step > 1:
        step >>= 1
        j = torch.arange(step, size, 2 * step, device=before.device)
        j = j[j >= clusters]
        if not len(j):
            continue
        lo = cuts[:, j - step].clamp(min=clusters - 1)
        right = j + step
        hi = torch.where(right < size, cuts[:, right.clamp(max=size - 1)], size)
        ends = j.expand(n, -1).contiguous()
        hi = torch.minimum(hi, ends - 1)
        after[:, j], cuts[:, j] = _best_cuts(s, before, lo, hi, ends)
    return after, cuts


def _seed(s: _Sorted, clusters: int) -> torch.Tensor:
    """Optimal clusters of the seed level: int64 [n, clusters + 1], where each cluster begins."""
    every = torch.arange(s.s0.shape[1], device=s.m.device).expand(len(s.m), -1)
    before = _gain(s, torch.zeros_like(every), every)
    bounds = torch.arange(clusters + 1, device=s.m.device).expand(len(s.m), -1)
    own = torch.minimum(bounds, s.m)  # each value its own cluster, the rest empty
    if s.s0.shape[1] - 1 <= clusters:
        return own
    layers = {}
    for layer in range(2, clusters):
        before, layers[layer] = _next_layer(s, before, layer)
    few = s.m <= clusters
    lo = torch.full_like(s.m, clusters - 1)
    _, cut = _best_cuts(s, before, lo, torch.where(few, lo, s.m - 1), s.m)
    found = [s.m, cut]
    for layer in range(clusters - 1, 1, -1):
        found.append(layers[layer].gather(1, found[-1]))
    found.append(torch.zeros_like(s.m))
    return torch.where(few, own, torch.cat(found[::-1], 1))


def _split(s: _Sorted, bounds: torch.Tensor) -> torch.Tensor:
    """Cut every cluster where that is best: bounds [n, C + 1] to [n, 2C + 1]."""
    start, stop = bounds[:, :-1].contiguous(), bounds[:, 1:].contiguous()
    place = torch.arange(s.s0.shape[1] - 1, device=bounds.device).expand(len(bounds), -1)
    segment = torch.searchsorted(stop, place.contiguous(), right=True)
    segment = segment.clamp_(max=start.shape[1] - 1)  # places beyond m: masked below
    weight = s.s0.gather(1, stop) - s.s0.gather(1, start)
    mean = (s.s1.gather(1, stop) - s.s1.gather(1, start)) / torch.where(weight > 0, weight, 1.0)
    first, whole = start.gather(1, segment), weight.gather(1, segment)
    left = s.s0[:, :-1] - s.s0.gather(1, first)
    apart = s.s1[:, :-1] - s.s1.gather(1, first) - mean.gather(1, segment) * left
    inside = (place > first) & (place < stop.gather(1, segment))
    score = torch.where(inside, apart * apart / (left * (whole - left)), -torch.inf)
    _, cut = _first_best(score, place, segment, start.shape[1])
    cut = torch.where(stop - start < 2, stop, cut)
    return torch.cat([torch.stack([start, cut], 2).flatten(1), bounds[:, -1:]], 1)


def _torch_bounds(s: _Sorted, seed_bits: int, top_bits: int) -> torch.Tensor:
    """Where each leaf cluster begins among the distinct values, int64 [n, 2^top_bits + 1]."""
    bounds = _seed(s, 1 << seed_bits)
    for _ in range(top_bits - seed_bits):
        bounds = _split(s, bounds)
    return bounds


def _kernel_bounds(s: _Sorted, seed_bits: int, top_bits: int) -> torch.Tensor:
    """`_torch_bounds` as one kernel."""
    rows, width = s.s0.shape
    s0, s1, m = s.s0.contiguous(), s.s1.contiguous(), s.m.contiguous()
    before, after = torch.empty_like(s0), torch.empty_like(s0)
    cuts = torch.empty((rows, 1 << seed_bits, width), dtype=torch.int32, device=m.device)
    bounds = torch.empty((rows, (1 << top_bits) + 1), dtype=torch.int64, device=m.device)
    used = (s0, s1, m, before, after, cuts, bounds)
    call = Clusters(*(tensor.data_ptr() for tensor in used), rows=rows, width=width)
    with torch.cuda.device(m.device):
        launch_clusters(
            torch.cuda.get_device_capability(),
            torch.cuda.get_device_name(),
            seed_bits,
            top_bits,
            call,
            torch.cuda.current_stream().cuda_stream,
        )
    return bounds


def _fit_chunk(
    weights: torch.Tensor, importance: torch.Tensor, seed_bits: int, top_bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    s = _sort(weights, importance)
    bounds = (_kernel_bounds if weights.is_cuda else _torch_bounds)(s, seed_bits, top_bits)
    by_rank = torch.searchsorted(bounds[:, 1:].contiguous(), s.place, right=True)
    codes = torch.empty_like(by_rank).scatter_(1, s.order, by_rank).to(torch.uint8)
    ranks = s.ends.gather(1, bounds)
    return codes, _segment_sums(s.h, ranks), _segment_sums(s.h * s.x, ranks)


def _segment_sums(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Sums of [n, K] between neighbouring `ends` [n, C + 1] that span the row, added in order."""
    lengths = ends.diff(dim=1)
    sums = torch.segment_reduce(values.flatten(), "sum", lengths=lengths.flatten(), initial=0)
    return sums.reshape(lengths.shape)


def _chunks(rows: int, cols: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // cols)
    return (slice(start, start + step) for start in range(0, rows, step))


def fit(
    weights: torch.Tensor, importance: torch.Tensor, seed_bits: int, top_bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 [N, K], leaf weights, leaf moments float64 [N, 2^top_bits]).

    weights float32 [N, K]; importance float64 [1 or N, K], all positive, on the same device.
    """
    parts = []
    for rows in _chunks(*weights.shape):
        h = importance if len(importance) == 1 else importance[rows]
        parts.append(_fit_chunk(weights[rows], h, seed_bits, top_bits))
    codes, leaf_weight, leaf_moment = (torch.cat(part) for part in zip(*parts, strict=True))
    return codes, leaf_weight, leaf_moment


def row_errors(
    weights: torch.Tensor,
    importance: torch.Tensor,
    codes: torch.Tensor,
    tables: dict[int, torch.Tensor],
) -> torch.Tensor:
    """float64 [N, levels]: sum over c of importance (W - W_b)^2 with the rounded centroids."""
    top = max(tables)
    out = torch.empty((len(weights), len(tables)), dtype=torch.float64, device=weights.device)
    for rows in _chunks(*weights.shape):
        h = importance if len(importance) == 1 else importance[rows]
        for position, (level, table) in enumerate(tables.items()):
            code = (codes[rows] >> (top - level)).long()
            apart = weights[rows].double() - table[rows].double().gather(1, code)
            out[rows, position] = (h * apart * apart).sum(1)
    return out
