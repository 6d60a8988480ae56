"""Watching a service: the latest state, and what it was a moment before, from wherever it shows."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import deque
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from pagedweight.errors import UserError
from pagedweight.runtime.metrics import View, read_metrics
from pagedweight.runtime.timeline import LineReader, Sample

RATE_SECONDS = 2.0
"""Rates are means over this long."""
_TIMEOUT = 5.0


class Source(Protocol):
    """`name` says where from. `read` returns the latest view; UserError when there is none."""

    name: str
    history: History

    def read(self) -> View: ...


class History:
    """The last `RATE_SECONDS` of samples, for rates."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        held, begin = self._samples, sample.monotonic - RATE_SECONDS
        held.append(sample)
        while len(held) > 2 and held[1].monotonic <= begin:
            held.popleft()

    def rate(self, name: str) -> float | None:
        """Growth of a total a second, None after one sample. A sample holds until the next one, so
        an older one stands for the begin of the window."""
        first, last = self._samples[0], self._samples[-1]
        seconds = min(last.monotonic - first.monotonic, RATE_SECONDS)
        if seconds <= 0:
            return None
        growth: float = getattr(last, name) - getattr(first, name)
        return growth / seconds


class ServerSource:
    """A running server's /metrics."""

    def __init__(self, url: str, engine: int = 0) -> None:
        """`url`: of the server, with or without /metrics behind it."""
        base = url if "://" in url else f"http://{url}"
        self.name = base.rstrip("/").removesuffix("/metrics")
        self.history = History()
        self._engine = engine

    def read(self) -> View:
        address = f"{self.name}/metrics"
        try:
            with urllib.request.urlopen(address, timeout=_TIMEOUT) as answer:
                text = answer.read().decode("utf-8", "replace")
        except (OSError, ValueError, HTTPException) as fault:
            why = getattr(fault, "reason", fault)
            raise UserError(f"{address} does not answer: {why}") from None
        view = read_metrics(text, time.time(), self._engine)
        self.history.add(view.sample)
        return view


class FileSource:
    """A timeline, read on as it grows."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.history = History()
        self._reader = LineReader(path)
        self._latest: Sample | None = None

    def read(self) -> View:
        for sample in self._reader.more():
            self.history.add(sample)
            self._latest = sample
        if self._latest is None:
            raise UserError(f"timeline {self.name} has no sample yet")
        return View.of(self._reader.header, self._latest)


def source_of(where: str, engine: int = 0) -> Source:
    """A file when `where` names one, else a server's address. UserError when it looks like a file
    that is not there."""
    path = Path(where)
    if path.is_file():
        return FileSource(path)
    if "://" not in where and ("/" in where or path.suffix == ".jsonl"):
        raise UserError(f"there is no timeline {where}")
    return ServerSource(where, engine)
