"""Events and staging memory: what lets ordered work be submitted without waiting for it.

compute stream   [step][write][moves][step].....[fill][step]      `move`, `fill`, `write`
                      \\                      ^
copy stream            +--[upload]------------+ event               `upload`, `after`
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from pagedweight.errors import Transient
from pagedweight.memory.interface import Bytes, Copy


class Marked:
    """Completion: everything that was on a stream when this was made has finished.

    `keep` lives as long as this does: what copies read from.
    """

    def __init__(self, stream: torch.cuda.Stream, keep: object = None) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)
        self._keep = keep

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What `stream` gets from now on starts only after this."""
        stream.wait_event(self.event)


class Submitting:
    """Completion of copies that a thread is still handing to the driver."""

    def __init__(self, future: Future[Marked]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done() and self._submitted().done()

    def wait(self) -> None:
        self._submitted().wait()

    def hold(self, stream: torch.cuda.Stream) -> None:
        self._submitted().hold(stream)

    def _submitted(self) -> Marked:
        error = self._future.exception()
        if error is None:
            return self._future.result()
        if isinstance(error, OSError):
            raise Transient(f"upload: {error}") from error
        raise error


class Staging:
    """Pinned buffers that small writes go through; one is lent again once its write is over.

    Buffers of one size, a power of two, are lent in turn among themselves: a write of a few bytes
    at every step takes none of those that a block table needs, and pinning waits for the driver.
    """

    def __init__(self, allocate: Callable[[int], Bytes]) -> None:
        self._allocate = allocate
        self._lent: dict[int, deque[tuple[Marked, Bytes]]] = {}

    def fill(self, data: Bytes) -> Bytes:
        """A pinned copy of `data`; call `lend` with it once its copy is on a stream."""
        size = max(4096, 1 << (data.nbytes - 1).bit_length())
        lent = self._lent.setdefault(size, deque())
        buffer = lent.popleft()[1] if lent and lent[0][0].done() else self._allocate(size)
        buffer[: data.nbytes] = data.reshape(-1).view(np.uint8)
        return buffer

    def lend(self, buffer: Bytes, stream: torch.cuda.Stream) -> None:
        """`buffer` is read by what `stream` has now."""
        self._lent[buffer.nbytes].append((Marked(stream), buffer))


def pinned_array(address: int, nbytes: int) -> Bytes:
    """uint8 [nbytes] over host memory at `address`."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def contiguous(copies: Sequence[Copy]) -> list[tuple[int, Any]]:
    """(target, contiguous source) of each copy; sources with gaps are packed."""
    return [(copy.target, np.ascontiguousarray(copy.source)) for copy in copies]
