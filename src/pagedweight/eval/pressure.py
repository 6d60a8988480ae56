"""A server's pressure as a budget for every window: what its load left of precision, by time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagedweight.errors import UserError
from pagedweight.runtime.timeline import Timeline


def bits_of_windows(timeline: Timeline, windows: int) -> npt.NDArray[np.float64]:
    """Mean bits of the weights, float64 [windows]: the run in even stretches, the least of each.

    A sample holds until the next. What was before the first request and after the last does not
    count. Raises UserError for a run that had none.
    """
    busy = np.flatnonzero(timeline.column("running") + timeline.column("waiting"))
    if not busy.size:
        raise UserError(f"{timeline.name}: no request ran, so there is no pressure to follow")
    part = slice(busy[0], busy[-1] + 1)
    times, bits = timeline.column("monotonic")[part], timeline.column("bits")[part]
    edges = np.linspace(times[0], times[-1], windows + 1)
    first = np.searchsorted(times, edges[:-1], side="right") - 1
    last = np.searchsorted(times, edges[1:], side="left").clip(min=first + 1)
    return np.array([bits[a:b].min() for a, b in zip(first, last, strict=True)])


def load_pressure(path: Path) -> Timeline:
    """A timeline of `serve --timeline`. Raises UserError when it is none, or no request ran."""
    timeline = Timeline.load(path)
    bits_of_windows(timeline, 1)
    return timeline
