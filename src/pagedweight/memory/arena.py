"""A dense arena: the slots of one size class, planes or lookup tables (DESIGN decision 4).

    slot    0     1     2     3     4     5     6
          [own ][own ][hole][own ][pin ][own ]|                      | end = 6
          |  page 0  |  page 1  |  page 2   |  page 3 (surplus)  |

Planes are smaller than a page, so freeing scattered ones frees nothing. A freed slot is a hole; the
last slot is copied into it, and whole pages past the end go back to the pool: at most one page of
a class is partly used. A pinned slot is being uploaded to and stays where it is.

Compaction is three steps, because a kernel reads addresses from a table of its own: `copy_moves`
copies in order, the caller writes the new addresses in order, `settle` makes them true here. A
failure before `settle` leaves the arena as it was: the copies lie in holes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pagedweight.errors import Transient, listing
from pagedweight.memory.attempts import all_of
from pagedweight.memory.backing import Backing
from pagedweight.memory.interface import POISON, Completion, Device, pages_of
from pagedweight.memory.pool import PagePool

HOLE = -1


class ArenaFull(Transient):
    """No addresses are left, because late copies still write to slots; nothing was taken."""


@dataclass(frozen=True, slots=True)
class Move:
    """Slot `source` of `owner` goes to the hole `target`, which is nearer to the start."""

    owner: int
    source: int
    target: int


class Arena:
    """Slots of `slot_bytes` at stable addresses, kept dense; `owner` numbers are the caller's."""

    def __init__(
        self,
        device: Device,
        pool: PagePool,
        name: str,
        slot_bytes: int,
        capacity: int,
        moved: Callable[[int, int], None],
        poison: bool = False,
    ) -> None:
        """Reserve addresses for `capacity` slots; `moved(owner, slot)` is called by `settle`.

        With `poison`, freed slots are filled with `POISON` in order.
        """
        self.name = name
        self.slot_bytes = slot_bytes
        self.backing = Backing(device, pool, device.reserve(slot_bytes * capacity, name))
        self.end = 0
        self._device = device
        self._pool = pool
        self._moved = moved
        self._poison = poison
        self._owner = np.full(capacity, HOLE, np.int64)
        self._holes: set[int] = set()
        self._pinned: set[int] = set()
        self._pages = 0

    @property
    def slack(self) -> int:
        """Pages wholly past the end that `release` would let go."""
        return self._pages - self._pages_at(self.end)

    @property
    def used(self) -> int:
        """Slots that have an owner."""
        return self.end - len(self._holes)

    def address(self, slot: int) -> int:
        return self.backing.span.base + slot * self.slot_bytes

    def owner(self, slot: int) -> int:
        return int(self._owner[slot])

    def pages_for(self, more: int) -> int:
        """Pages that allocating `more` slots would take from the pool now."""
        return self.backing.missing(range(self._pages_at(self._end_with(more))))

    def allocate(self, owners: Sequence[int], urgent: bool = False) -> list[int]:
        """A slot for each owner, holes first; all or none.

        Raises PoolShort, ArenaFull or Transient.
        """
        end = self._end_with(len(owners))
        if end > len(self._owner):
            raise ArenaFull(f"{self.name}: {end} slots where {len(self._owner)} have addresses")
        pages = self._pages_at(end)
        self.backing.back(range(self._pages, pages), urgent)
        self._pages = max(self._pages, pages)
        slots = sorted(self._holes)[: len(owners)]
        slots += range(self.end, end)
        self._holes.difference_update(slots)
        self.end = end
        self._owner[slots] = owners
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """The slots become holes. With poison on, raises Transient after they all are."""
        freed = list(slots)
        self.discard(freed)
        self._taint(freed)

    def discard(self, slots: Iterable[int]) -> None:
        """The slots become holes, whatever they hold; never fails."""
        for slot in slots:
            if not 0 <= slot < self.end or slot in self._holes or slot in self._pinned:
                raise ValueError(f"{self.name}: slot {slot} is not there to be freed")
            self._owner[slot] = HOLE
            self._holes.add(slot)

    def pin(self, slots: Iterable[int]) -> None:
        """The slots are being uploaded to: they are not moved."""
        self._pinned.update(slots)

    def unpin(self, slots: Iterable[int]) -> None:
        self._pinned.difference_update(slots)

    # -- compaction ------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """What would make the arena dense: last slots into the lowest holes, up to a pinned one."""
        found: list[Move] = []
        end = self.end
        for hole in sorted(self._holes):
            while end > hole and end - 1 in self._holes:
                end -= 1
            if hole >= end or end - 1 in self._pinned:
                break
            found.append(Move(self.owner(end - 1), end - 1, hole))
            end -= 1
        return found

    def copy_moves(self, moves: Sequence[Move]) -> None:
        """In order: copy each move's slot. Raises Transient; then the arena is as before."""
        if moves:
            targets = [self.address(move.target) for move in moves]
            sources = [self.address(move.source) for move in moves]
            self._device.move_slots(targets, sources, self.slot_bytes)

    def settle(self, moves: Sequence[Move]) -> None:
        """The kernels know the new addresses: the sources are gone, the end comes down.

        With poison on, raises Transient after everything is settled.
        """
        for move in moves:
            self._owner[move.target] = move.owner
            self._owner[move.source] = HOLE
            self._holes.remove(move.target)
            self._holes.add(move.source)
            self._moved(move.owner, move.target)
        while self.end and self.end - 1 in self._holes:
            self.end -= 1
            self._holes.remove(self.end)
        self._taint([move.source for move in moves])

    def release(self, fence: Completion) -> None:
        """Pages wholly past the end may go when `fence` is done; `backing.reclaim` takes them."""
        pages = self._pages_at(self.end)
        self.backing.release(range(pages, self._pages), fence)
        self._pages = pages

    # -- inside ----------------------------------------------------------------------------------

    def _end_with(self, more: int) -> int:
        return self.end + max(0, more - len(self._holes))

    def _pages_at(self, end: int) -> int:
        return pages_of(end * self.slot_bytes, self._pool.page_bytes)

    def _taint(self, slots: Sequence[int]) -> None:
        if not self._poison:
            return
        all_of(
            partial(self._device.fill, self.address(slot), self.slot_bytes, POISON)
            for slot in slots
        )

    def check_integrity(self) -> None:
        """Raise AssertionError when slots, holes, pins and pages do not fit together."""
        self.backing.check_integrity()
        live = np.flatnonzero(self._owner != HOLE).tolist()
        problems = {
            "holes past the end": [h for h in self._holes if h >= self.end],
            "slots without owner that are no holes": set(range(self.end)) - set(live) - self._holes,
            "owned slots past the end or in holes": [
                s for s in live if s >= self.end or s in self._holes
            ],
            "pinned slots without owner": self._pinned - set(live),
            "slots on pages that are not backed": [
                page for page in range(self._pages) if not self.backing.is_backed(page)
            ],
        }
        for what, found in problems.items():
            if found:
                raise AssertionError(f"{self.name}: {what}: {listing(sorted(found))}")
        if self._pages < self._pages_at(self.end):
            raise AssertionError(f"{self.name}: {self.end} slots on {self._pages} pages")
        if self.backing.mapped != self._pages + self.backing.surplus:
            raise AssertionError(f"{self.name}: pages are mapped that nothing accounts for")
