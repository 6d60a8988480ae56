"""A device for tests: it fails when told to, keeps its orders of time apart, and spoils memory.

The ordered work is a queue that runs only when `run` is called (or at once, with `lazy=False`), and
uploads run when `run_uploads` is called, so a test decides how far the device lags behind the
host. Pages get garbage when they are mapped and when they are unmapped. Work that touches memory
which is not mapped when it runs is an AssertionError that names it: the crash of a real device.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pagedweight.errors import Transient
from pagedweight.memory.interface import POISON, AddressRange, Bytes, Completion, Copy, pages_of

if TYPE_CHECKING:
    import torch

GARBAGE = 0xEE
"""What a page holds right after it was mapped."""

Fault = Callable[[int, str], bool]
"""Whether the call with this number (from 0) and name fails."""


def fail_at(*numbers: int) -> Fault:
    """Fail the calls with these numbers."""
    return lambda number, name: number in numbers


@dataclass
class _Upload:
    device: FakeDevice
    copies: list[Copy]
    position: int
    fails: bool
    finished: bool = False

    def done(self) -> bool:
        if self.finished and self.fails:
            raise Transient("injected: an upload broke off")
        return self.finished

    def wait(self) -> None:
        self.device.run(until=self.position)
        self.device.perform(self)
        self.done()


@dataclass
class _Fence:
    device: FakeDevice
    position: int

    def done(self) -> bool:
        return self.device.executed >= self.position

    def wait(self) -> None:
        self.device.run(until=self.position)


@dataclass
class _Span:
    memory: Bytes
    mapped: np.ndarray
    tolerant: bool
    owners: list[int] = field(default_factory=list)


class FakeDevice:
    """See the module. `calls` records every fallible call as (name, arguments...)."""

    def __init__(self, page_bytes: int = 4096, lazy: bool = False) -> None:
        self.page_bytes = page_bytes
        self.lazy = lazy
        self.fault: Fault = fail_at()
        self.upload_fault: Fault = fail_at()
        self.calls: list[tuple[str, int, int]] = []
        self.submitted = 0
        self.executed = 0
        self._queue: deque[Callable[[], None]] = deque()
        self.waiting: list[_Upload] = []
        self._spans: dict[str, tuple[AddressRange, _Span]] = {}
        self._page_at: dict[int, tuple[str, int]] = {}
        self._pages = 0
        self.upload_number = 0

    # -- at once ---------------------------------------------------------------------------------

    def create(self, count: int) -> None:
        self._pages = count

    def reserve(self, nbytes: int, name: str, tolerant: bool = False) -> AddressRange:
        count = pages_of(max(1, nbytes), self.page_bytes)
        whole = np.full((count + 1) * self.page_bytes, POISON, np.uint8)
        skip = -whole.ctypes.data % self.page_bytes
        memory = whole[skip : skip + count * self.page_bytes]
        span = AddressRange(memory.ctypes.data, memory.nbytes, name)
        self._spans[name] = (span, _Span(memory, np.zeros(count, np.bool_), tolerant))
        return span

    def map(self, span: AddressRange, first: int, pages: Sequence[int]) -> None:
        self._call("map", first, len(pages))
        mapped = self._spans[span.name][1].mapped[first : first + len(pages)]
        if mapped.any() or len(mapped) != len(pages):
            raise ValueError(f"{span.name}: pages at {first} are mapped already or do not exist")
        taken = [page for page in pages if page in self._page_at or not 0 <= page < self._pages]
        if taken:
            raise ValueError(f"physical pages {taken} are mapped elsewhere or do not exist")
        for index, page in enumerate(pages, first):
            self._page_at[page] = (span.name, index)
        mapped[:] = True
        self._spoil(span, first, len(pages), GARBAGE)

    def unmap(self, span: AddressRange, first: int, count: int) -> None:
        self._call("unmap", first, count)
        mapped = self._spans[span.name][1].mapped[first : first + count]
        if not mapped.all() or len(mapped) != count:
            raise ValueError(f"{span.name}: pages at {first} are not mapped")
        mapped[:] = False
        gone = {(span.name, index) for index in range(first, first + count)}
        self._page_at = {page: at for page, at in self._page_at.items() if at not in gone}
        self._spoil(span, first, count, POISON)

    # -- in order --------------------------------------------------------------------------------

    def launch(self, work: Callable[[], None]) -> None:
        """In order: a model step, or anything that a test wants to run there."""
        self.submitted += 1
        self._queue.append(work)
        if not self.lazy:
            self.run()

    def move(self, target: int, source: int, nbytes: int) -> None:
        self._call("move", target, source)

        def work() -> None:
            self.require_mapped(source, nbytes, "move from")
            self.require_mapped(target, nbytes, "move to")
            ctypes.memmove(target, source, nbytes)

        self.launch(work)

    def move_slots(self, targets: Sequence[int], sources: Sequence[int], nbytes: int) -> None:
        for target, source in zip(targets, sources, strict=True):
            self.move(target, source, nbytes)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        self._call("fill", address, nbytes)

        def work() -> None:
            self.require_mapped(address, nbytes, "fill")
            ctypes.memset(address, byte, nbytes)

        self.launch(work)

    def write(self, address: int, data: Bytes) -> None:
        self._call("write", address, data.nbytes)
        staged = data.tobytes()

        def work() -> None:
            ctypes.memmove(address, staged, len(staged))

        self.launch(work)

    def fence(self) -> Completion:
        return _Fence(self, self.submitted)

    def after(self, completion: Completion) -> None:
        self.launch(completion.wait)

    def run(self, until: int | None = None) -> None:
        """Run the queue, whole or up to a position."""
        while self._queue and (until is None or self.executed < until):
            work = self._queue.popleft()
            self.executed += 1
            work()

    # -- beside ----------------------------------------------------------------------------------

    def upload(self, copies: Sequence[Copy]) -> Completion:
        self._call("upload", copies[0].target if copies else 0, len(copies))
        fails = self.upload_fault(self.upload_number, "upload")
        self.upload_number += 1
        upload = _Upload(self, list(copies), self.submitted, fails)
        self.waiting.append(upload)
        if not self.lazy:
            self.perform(upload)
        return upload

    def run_uploads(self, count: int | None = None) -> None:
        """Finish up to `count` uploads, oldest first, of those that may have begun by now."""
        ready = [u for u in self.waiting if u.position <= self.executed]
        for upload in ready[:count]:
            self.perform(upload)

    def perform(self, upload: _Upload) -> None:
        """Do one upload's copies, or the first half of them when it is to fail."""
        if upload.finished:
            return
        self.waiting.remove(upload)
        upload.finished = True
        count = len(upload.copies) // 2 if upload.fails else len(upload.copies)
        for copy in upload.copies[:count]:
            self.require_mapped(copy.target, copy.source.nbytes, "upload to")
            ctypes.memmove(copy.target, copy.source.tobytes(), copy.source.nbytes)

    # -- looking ---------------------------------------------------------------------------------

    def read(self, address: int, nbytes: int) -> Bytes:
        self.run()
        return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8).copy()

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        import torch

        for span, held in self._spans.values():
            if span.base <= address and address + nbytes <= span.base + span.nbytes:
                at = address - span.base
                return torch.from_numpy(held.memory[at : at + nbytes].view(np.int8))
        raise ValueError(f"{nbytes} bytes at {address:#x} are in no range")

    def close(self) -> None:
        self._queue.clear()
        self.waiting.clear()
        self._spans.clear()

    def require_mapped(self, address: int, nbytes: int, what: str) -> None:
        """AssertionError unless all of an area in a range is mapped now."""
        for span, held in self._spans.values():
            if span.base <= address < span.base + span.nbytes:
                first = (address - span.base) // self.page_bytes
                last = (address + nbytes - 1 - span.base) // self.page_bytes
                if not held.tolerant and not held.mapped[first : last + 1].all():
                    raise AssertionError(f"{what} {span.name}: pages {first}..{last} are unmapped")
                return
        raise AssertionError(f"{what} {address:#x}: in no reserved range")

    def _call(self, name: str, first: int, second: int) -> None:
        number = len(self.calls)
        self.calls.append((name, first, second))
        if self.fault(number, name):
            raise Transient(f"injected: call {number}, {name}")

    def _spoil(self, span: AddressRange, first: int, count: int, byte: int) -> None:
        memory = self._spans[span.name][1].memory
        memory[first * self.page_bytes : (first + count) * self.page_bytes] = byte
