"""Timing on a GPU: graph replays between events, and the bandwidth to hold them against."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def replay_seconds(work: Callable[[], None], repeats: int = 15) -> float:
    """Median time of a CUDA-graph replay of `work`, which has run once before the capture."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    return _median_seconds(graph.replay, repeats)


def copy_bandwidth(size: int = 1 << 32) -> float:
    """Bytes a second of a device-to-device copy, counting those read and those written."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / _median_seconds(lambda: target.copy_(source), 10)


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
