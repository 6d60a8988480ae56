"""The one interface to device memory: what `host`, `cuda` and the fake of the tests implement.

Three orders of time meet here, and every rule of memory safety is a rule about them.

    at once      map, unmap, reserve: done when the call returns, whatever the device is doing
    in order     move, fill, write, and the model's own steps: one after the other, as submitted;
                 the call may return before they ran
    beside       upload: runs on its own thread or stream, but begins only after everything that was
                 submitted in order before it; nothing submitted later waits for it

So memory may be given a new meaning by an ordered call or by an upload at any time, but may be
unmapped only when a fence says that all ordered work that could touch it has finished (on CUDA,
unmapping does not wait for kernels). What was uploaded may be used in order once its completion is
done. The contents of a page that was just mapped are undefined.

Methods raise `Transient` when the device refuses; the call then changed nothing. A wrong argument
(a page mapped twice, an offset that is no whole page) is a bug and raises ValueError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

POISON = 0xFF
"""Byte that retired memory is filled with when asked to: NaN as a centroid or in KV, every code bit
set in a plane, and no address at all."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class AddressRange:
    """Reserved addresses: `base` (a multiple of the page size), `nbytes` (whole pages), a name."""

    base: int
    nbytes: int
    name: str


class Completion(Protocol):
    """Handle of something that finishes later."""

    def done(self) -> bool:
        """Whether it has finished. Raises Transient when it failed."""
        ...

    def wait(self) -> None:
        """Block this thread until it has finished. Raises Transient when it failed."""
        ...


class _Done:
    """A completion of something that has already finished."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


DONE: Completion = _Done()


@dataclass(frozen=True, slots=True)
class Copy:
    """One piece of an upload: `source` (host memory, any strides) to `target`, an address."""

    target: int
    source: Bytes


class PinnedCopies(Sequence[Copy]):
    """Pieces of an upload out of pinned host memory, by address: no object for each piece.

    targets, sources, nbytes: int64 [n]. `keep` owns what the sources lie in.
    """

    def __init__(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        keep: object,
    ) -> None:
        self.targets, self.sources, self.nbytes = targets, sources, nbytes
        self._keep = keep

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, at: Any) -> Any:
        """The piece as a `Copy`, for devices that take one after the other."""
        if not isinstance(at, int):
            raise TypeError("pieces are numbered")
        source = (ctypes.c_uint8 * int(self.nbytes[at])).from_address(int(self.sources[at]))
        return Copy(int(self.targets[at]), np.ctypeslib.as_array(source))


class Device(Protocol):
    """Device memory in pages. Physical pages are numbers 0..count-1, all created at start-up."""

    page_bytes: int

    def create(self, count: int) -> None:
        """Create the physical pages, once. UserError with both numbers when they do not exist."""
        ...

    def reserve(self, nbytes: int, name: str, tolerant: bool = False) -> AddressRange:
        """Reserve addresses for `nbytes`, rounded up to pages, for the life of the device.

        A stray access where no page is mapped is a fault; in a `tolerant` range it reads or writes
        something meaningless instead (one scratch page on CUDA).
        """
        ...

    def map(self, span: AddressRange, first: int, pages: Sequence[int]) -> None:
        """Put physical `pages` at page indices first, first + 1, ... of `span`; all or none."""
        ...

    def unmap(self, span: AddressRange, first: int, count: int) -> None:
        """Take the pages away from page indices first .. first + count - 1; all or none."""
        ...

    def upload(self, copies: Sequence[Copy]) -> Completion:
        """Copy host memory to the device, beside the ordered work; one handle for all copies."""
        ...

    def move(self, target: int, source: int, nbytes: int) -> None:
        """In order: copy on the device. The two areas do not overlap."""
        ...

    def move_slots(self, targets: Sequence[int], sources: Sequence[int], nbytes: int) -> None:
        """In order: `move` for each pair; no area is in more than one of them."""
        ...

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """In order: set memory to `byte` (zero new KV, poison retired planes)."""
        ...

    def write(self, address: int, data: Bytes) -> None:
        """In order: a small write of host data, which may change as soon as the call returns.

        `address` is device memory of any kind, not only of pages (the kernels' block tables).
        """
        ...

    def fence(self) -> Completion:
        """Done when everything submitted in order so far, the model's steps too, has finished."""
        ...

    def after(self, completion: Completion) -> None:
        """In order: what is submitted next starts only after `completion` (an upload).

        Raises Transient when the upload is known to have failed. One that fails later is a failure
        of the device as a whole, as any failed copy is on CUDA.
        """
        ...

    def read(self, address: int, nbytes: int) -> Bytes:
        """A copy of device memory, after all ordered work; for checks and tests, it blocks."""
        ...

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """int8 tensor over device memory, without a copy and without touching it."""
        ...

    def close(self) -> None:
        """Give everything back; nothing may be used afterwards."""
        ...


def pages_of(nbytes: int, page_bytes: int) -> int:
    """Pages that hold `nbytes`."""
    return -(-nbytes // page_bytes)
