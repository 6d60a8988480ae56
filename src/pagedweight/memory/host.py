"""The host backend: the device tier is anonymous memory under a byte budget (DESIGN decision 2).

A reserved range is an anonymous mapping without access. Mapping a page gives it access, unmapping
takes the access away and tells the kernel to drop the contents, so resident memory really falls
and a read of a retired page is a crash, not a wrong answer. Ordered work is done by the caller
before the call returns; uploads have one thread of their own. A page's number is bookkeeping here:
the budget is what is shared.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from pagedweight.errors import Transient, UserError
from pagedweight.memory import libc
from pagedweight.memory.interface import DONE, AddressRange, Bytes, Completion, Copy, pages_of
from pagedweight.memory.limits import available_bytes

if TYPE_CHECKING:
    import torch

HUGE_PAGE = 2 << 20
SMALL_PAGE = 64 << 10
"""Default page size: the smallest multiple of every Linux page size in use, so that small models
move too."""


class _Uploaded:
    """Completion of an upload; anything that went wrong on the thread is a Transient here."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        if not self._future.done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        error = self._future.exception()
        if error is not None:
            raise Transient(f"upload: {error}") from error


class HostDevice:
    """Anonymous memory in pages of `page_bytes` (a multiple of the system's page size)."""

    def __init__(self, page_bytes: int = SMALL_PAGE) -> None:
        system = os.sysconf("SC_PAGE_SIZE")
        if page_bytes < system or page_bytes % system:
            raise UserError(
                f"a page of {page_bytes} bytes is no multiple of this system's {system} bytes"
            )
        self.page_bytes = page_bytes
        self._pages = 0
        self._mappings: list[tuple[int, int]] = []
        self._mapped: dict[str, np.ndarray] = {}
        self._tolerant: set[str] = set()
        self._thread: ThreadPoolExecutor | None = None

    def create(self, count: int) -> None:
        if self._pages:
            raise ValueError("the device's pages were created already")
        need, have = count * self.page_bytes, available_bytes()
        if need > have:
            raise UserError(
                f"the device tier needs {need} bytes of memory ({count} pages of "
                f"{self.page_bytes}) and this process may take {have}: lower the memory budget"
            )
        self._pages = count

    def reserve(self, nbytes: int, name: str, tolerant: bool = False) -> AddressRange:
        if name in self._mapped:
            raise ValueError(f"a range named {name} exists already")
        count = pages_of(max(1, nbytes), self.page_bytes)
        align = max(self.page_bytes, HUGE_PAGE)
        whole = count * self.page_bytes + align
        try:
            start = libc.map_without_access(whole)
        except Transient as error:
            raise UserError(
                f"{name}: {whole} bytes of address space are refused: {error}"
            ) from error
        self._mappings.append((start, whole))
        base = -(-start // align) * align
        self._advise_huge(base, count * self.page_bytes)
        if tolerant:
            libc.protect(base, count * self.page_bytes, libc.PROT_READ_WRITE)
            self._tolerant.add(name)
        self._mapped[name] = np.zeros(count, np.bool_)
        return AddressRange(base, count * self.page_bytes, name)

    def map(self, span: AddressRange, first: int, pages: Sequence[int]) -> None:
        mapped = self._part(span, first, len(pages))
        if mapped.any() or any(not 0 <= page < self._pages for page in pages):
            raise ValueError(f"{span.name}: pages at {first} are mapped, or pages do not exist")
        start, nbytes = self._area(span, first, len(pages))
        if span.name in self._tolerant:
            libc.advise(start, nbytes, libc.MADV_DONTNEED)  # what strays wrote is not contents
        else:
            libc.protect(start, nbytes, libc.PROT_READ_WRITE)
        mapped[:] = True

    def unmap(self, span: AddressRange, first: int, count: int) -> None:
        mapped = self._part(span, first, count)
        if not mapped.all():
            raise ValueError(f"{span.name}: pages at {first} are not mapped")
        start, nbytes = self._area(span, first, count)
        libc.advise(start, nbytes, libc.MADV_DONTNEED)
        if span.name not in self._tolerant:
            libc.protect(start, nbytes, libc.PROT_NONE)
        mapped[:] = False

    def upload(self, copies: Sequence[Copy]) -> Completion:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pagedweight-upload")
        return _Uploaded(self._thread.submit(_copy_all, list(copies)))

    def move(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def move_slots(self, targets: Sequence[int], sources: Sequence[int], nbytes: int) -> None:
        for target, source in zip(targets, sources, strict=True):
            self.move(target, source, nbytes)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        ctypes.memset(address, byte, nbytes)

    def write(self, address: int, data: Bytes) -> None:
        _view(address, data.nbytes)[:] = data.reshape(-1).view(np.uint8)

    def fence(self) -> Completion:
        return DONE

    def after(self, completion: Completion) -> None:
        completion.wait()

    def read(self, address: int, nbytes: int) -> Bytes:
        return _view(address, nbytes).copy()

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        import torch

        buffer = (ctypes.c_int8 * nbytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.int8)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        for start, nbytes in self._mappings:
            libc.unmap(start, nbytes)
        self._mappings.clear()
        self._mapped.clear()

    def _advise_huge(self, base: int, nbytes: int) -> None:
        """Huge pages when a page is made of them; otherwise none, or a freed page would stay."""
        huge = self.page_bytes % HUGE_PAGE == 0
        advice = libc.MADV_HUGEPAGE if huge else libc.MADV_NOHUGEPAGE
        # Refused only by a kernel that has no huge pages, where there is nothing to advise.
        with contextlib.suppress(Transient):
            libc.advise(base, nbytes, advice)

    def _part(self, span: AddressRange, first: int, count: int) -> np.ndarray:
        mapped = self._mapped[span.name]
        if not 0 <= first <= first + count <= len(mapped):
            raise ValueError(f"{span.name}: pages {first}..{first + count - 1} of {len(mapped)}")
        return mapped[first : first + count]

    def _area(self, span: AddressRange, first: int, count: int) -> tuple[int, int]:
        return span.base + first * self.page_bytes, count * self.page_bytes


def _view(address: int, nbytes: int) -> Bytes:
    """uint8 array over raw memory."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _copy_all(copies: list[Copy]) -> None:
    for copy in copies:
        target = _view(copy.target, copy.source.nbytes)
        # numpy lets other threads run while it copies, page faults on the checkpoint included.
        np.copyto(target.view(copy.source.dtype).reshape(copy.source.shape), copy.source)
