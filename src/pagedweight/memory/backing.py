"""Which pages of a reserved range are backed by memory, and which wait to go back to the pool.

    index   0    1    2    3    4    5    6    7
          [###][###][###][   ][sss][###][sss][   ]
            backed         |    |              +-- nothing mapped
                           +--- surplus: mapped, needed by nobody, may still be read until its
                                fence is done

A page that is no longer needed becomes surplus with a fence; `reclaim` unmaps those whose fence is
done. A surplus page that is needed again is simply taken back. A failed `back` leaves what it had
mapped as surplus with nothing to wait for, so undoing can never fail itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from pagedweight.errors import Transient
from pagedweight.memory.attempts import all_of
from pagedweight.memory.interface import DONE, AddressRange, Completion, Device
from pagedweight.memory.pool import PagePool


def runs(indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring numbers of an ascending sequence as (first, count)."""
    first, count = 0, 0
    for index in indices:
        if count and index == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = index, 1
    if count:
        yield first, count


class Backing:
    """The mapped pages of one range; `span.name` is its owner name in the pool."""

    def __init__(self, device: Device, pool: PagePool, span: AddressRange) -> None:
        self.span = span
        self._device = device
        self._pool = pool
        self._held: dict[int, int] = {}
        self._surplus: dict[int, Completion] = {}
        self.held_back = 0
        """Pages that the last `reclaim` could have unmapped, had it been allowed more."""

    @property
    def mapped(self) -> int:
        """Pages mapped now, surplus ones included."""
        return len(self._held)

    @property
    def surplus(self) -> int:
        """Mapped pages that only wait for their fence."""
        return len(self._surplus)

    def is_backed(self, index: int) -> bool:
        return index in self._held and index not in self._surplus

    def missing(self, indices: Iterable[int]) -> int:
        """How many of `indices` would have to be taken from the pool to back them all."""
        return sum(index not in self._held for index in indices)

    def back(self, indices: Iterable[int], urgent: bool = False) -> None:
        """Back page `indices` (any order; backed ones stay), all or none.

        Raises PoolShort or Transient; pages mapped before the failure are surplus then.
        """
        wanted = sorted(set(indices))
        new = [index for index in wanted if index not in self._held]
        pages = self._pool.take(len(new), self.span.name, urgent)
        mapped = 0
        try:
            for first, count in runs(new):
                run = pages[mapped : mapped + count]
                self._device.map(self.span, first, run)
                self._held.update(zip(range(first, first + count), run, strict=True))
                mapped += count
        except Transient:
            self._surplus.update((index, DONE) for index in new[:mapped])
            self._pool.give(pages[mapped:], self.span.name)
            raise
        for index in wanted:
            self._surplus.pop(index, None)

    def release(self, indices: Iterable[int], fence: Completion) -> None:
        """Nobody needs page `indices` any more; they may go when `fence` is done."""
        for index in indices:
            if not self.is_backed(index):
                raise ValueError(f"{self.span.name}: page {index} is released but not backed")
            self._surplus[index] = fence

    def reclaim(self, most: int | None = None) -> int:
        """Unmap the surplus pages whose fence is done, back to the pool; returns how many.

        `most`: no more than so many, None for all. Raises the first Transient after having tried
        them; what could not go stays surplus.
        """
        self.held_back = 0
        if not self._surplus:
            return 0
        fences = {id(fence): fence for fence in self._surplus.values()}  # shared by many pages
        passed = {key for key, fence in fences.items() if fence.done()}
        ready = sorted(index for index, fence in self._surplus.items() if id(fence) in passed)
        allowed = ready[:most]
        self.held_back = len(ready) - len(allowed)
        return sum(all_of(partial(self._unmap, *run) for run in runs(allowed)))

    def _unmap(self, first: int, count: int) -> int:
        self._device.unmap(self.span, first, count)
        indices = range(first, first + count)
        for index in indices:
            del self._surplus[index]
        self._pool.give([self._held.pop(index) for index in indices], self.span.name)
        return count

    def pages(self) -> list[int]:
        """Physical pages held, for the pool's integrity check."""
        return list(self._held.values())

    def check_integrity(self) -> None:
        last = self.span.nbytes // self._pool.page_bytes
        if not self._surplus.keys() <= self._held.keys():
            raise AssertionError(f"{self.span.name}: surplus pages that are not mapped")
        if any(not 0 <= index < last for index in self._held):
            raise AssertionError(f"{self.span.name}: a page outside the range is mapped")
        if len(set(self._held.values())) != len(self._held):
            raise AssertionError(f"{self.span.name}: a physical page is mapped twice")
