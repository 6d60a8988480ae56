"""A dense arena: the slots of one size class, planes or lookup tables (DESIGN decision 4).

    slot    0     1     2     3     4     5     6
          [own ][own ][hole][own ][pin ][own ]|                      | end = 6
          |  page 0  |  page 1  |  page 2   |  page 3 (surplus)  |

Planes are smaller than a page, so freeing scattered ones frees nothing. A freed slot is a hole; the
last slot is copied into it, and whole pages past the end go back to the pool: at most one page of
a class is partly used. A pinned slot is being uploaded to and stays where it is.

Compaction is three steps, because a kernel reads addresses from a table of its own: `copy_moves`
copies in order, the caller writes the new addresses in order, `settle` makes them true here. A
failure before `settle` leaves the arena as it was: the copies lie in holes. All of it is arithmetic
on arrays: a batch of rows frees and moves thousands of slots between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pagedweight.core.size_table import IntArray
from pagedweight.errors import Transient, listing
from pagedweight.memory.attempts import all_of
from pagedweight.memory.backing import Backing
from pagedweight.memory.interface import POISON, Completion, Device, pages_of
from pagedweight.memory.pool import PagePool

HOLE = -1


class ArenaFull(Transient):
    """No addresses are left, because late copies still write to slots; nothing was taken."""


@dataclass(frozen=True, eq=False)
class Moves:
    """Slot sources[i] of owners[i] goes to the hole targets[i], nearer to the start; int64 [n]."""

    owners: IntArray
    sources: IntArray
    targets: IntArray

    def __len__(self) -> int:
        return len(self.owners)


NO_MOVES = Moves(*(np.empty(0, np.int64) for _ in range(3)))


class Arena:
    """Slots of `slot_bytes` at stable addresses, kept dense; `owner` numbers are the caller's."""

    def __init__(
        self,
        device: Device,
        pool: PagePool,
        name: str,
        slot_bytes: int,
        capacity: int,
        moved: Callable[[IntArray, IntArray], None],
        poison: bool = False,
    ) -> None:
        """Reserve addresses for `capacity` slots; `settle` calls `moved(owners, slots)`.

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
        self._hole = np.zeros(capacity, np.bool_)
        self._pinned = np.zeros(capacity, np.bool_)
        self._hole_count = 0
        self._pages = 0

    @property
    def slack(self) -> int:
        """Pages wholly past the end that `release` would let go."""
        return self._pages - self._pages_at(self.end)

    @property
    def used(self) -> int:
        """Slots that have an owner."""
        return self.end - self._hole_count

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
        filled = np.flatnonzero(self._hole[: self.end])[: len(owners)]
        slots = np.concatenate([filled, np.arange(self.end, end)])
        self._hole[filled] = False
        self._hole_count -= len(filled)
        self.end = end
        self._owner[slots] = owners
        out: list[int] = slots.tolist()
        return out

    def free(self, slots: Iterable[int]) -> None:
        """The slots become holes. With poison on, raises Transient after they all are."""
        freed = list(slots)
        self.discard(freed)
        self._taint(freed)

    def discard(self, slots: Iterable[int]) -> None:
        """The slots become holes, whatever they hold; never fails."""
        gone = np.fromiter(slots, np.int64)
        inside = gone[(gone >= 0) & (gone < self.end)]
        held = inside[~(self._hole[inside] | self._pinned[inside])]
        if len(np.unique(held)) != len(gone):
            raise ValueError(
                f"{self.name}: of slots {listing(gone)} some are not there to be freed"
            )
        self._owner[gone] = HOLE
        self._hole[gone] = True
        self._hole_count += len(gone)

    def pin(self, slots: Iterable[int]) -> None:
        """The slots are being uploaded to: they are not moved."""
        self._pinned[np.fromiter(slots, np.int64)] = True

    def unpin(self, slots: Iterable[int]) -> None:
        self._pinned[np.fromiter(slots, np.int64)] = False

    # -- compaction ------------------------------------------------------------------------------

    def moves(self) -> Moves:
        """What would make the arena dense: last slots into the lowest holes, up to a pinned one."""
        if not self._hole_count:
            return NO_MOVES
        holes = np.flatnonzero(self._hole[: self.end])
        last = np.flatnonzero(~self._hole[: self.end])[::-1]
        pinned = self._pinned[last]
        free = int(pinned.argmax()) if pinned.any() else len(last)
        count = min(len(holes), free)
        holes, last = holes[:count], last[:count]
        nearer = int(np.count_nonzero(holes < last))  # holes rise and last slots fall: a prefix
        return Moves(self._owner[last[:nearer]], last[:nearer], holes[:nearer])

    def copy_moves(self, moves: Moves) -> None:
        """In order: copy each move's slot. Raises Transient; then the arena is as before."""
        if len(moves):
            base, size = self.backing.span.base, self.slot_bytes
            targets, sources = base + moves.targets * size, base + moves.sources * size
            self._device.move_slots(targets.tolist(), sources.tolist(), size)

    def settle(self, moves: Moves) -> None:
        """The kernels know the new addresses: the sources are gone, the end comes down.

        With poison on, raises Transient after everything is settled.
        """
        if not self._hole_count:
            return
        if len(moves):
            self._owner[moves.targets] = moves.owners
            self._owner[moves.sources] = HOLE
            self._hole[moves.targets] = False
            self._hole[moves.sources] = True
            self._moved(moves.owners, moves.targets)
        live = np.flatnonzero(~self._hole[: self.end])
        end = int(live[-1]) + 1 if len(live) else 0
        self._hole[end : self.end] = False
        self._hole_count -= self.end - end
        self.end = end
        self._taint(moves.sources.tolist())

    def release(self, fence: Completion) -> None:
        """Pages wholly past the end may go when `fence` is done; `backing.reclaim` takes them."""
        pages = self._pages_at(self.end)
        self.backing.release(range(pages, self._pages), fence)
        self._pages = pages

    # -- inside ----------------------------------------------------------------------------------

    def _end_with(self, more: int) -> int:
        return self.end + max(0, more - self._hole_count)

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
        live, holes = self._owner != HOLE, self._hole
        past = np.arange(len(live)) >= self.end
        problems = {
            "holes past the end": np.flatnonzero(holes & past).tolist(),
            "slots without owner that are no holes": np.flatnonzero(
                ~(live | holes | past)
            ).tolist(),
            "owned slots past the end or in holes": np.flatnonzero(live & (past | holes)).tolist(),
            "pinned slots without owner": np.flatnonzero(self._pinned & ~live).tolist(),
            "slots on pages that are not backed": [
                page for page in range(self._pages) if not self.backing.is_backed(page)
            ],
        }
        for what, found in problems.items():
            if found:
                raise AssertionError(f"{self.name}: {what}: {listing(sorted(found))}")
        if self._hole_count != np.count_nonzero(holes):
            raise AssertionError(f"{self.name}: {self._hole_count} holes are counted")
        if self._pages < self._pages_at(self.end):
            raise AssertionError(f"{self.name}: {self.end} slots on {self._pages} pages")
        if self.backing.mapped != self._pages + self.backing.surplus:
            raise AssertionError(f"{self.name}: pages are mapped that nothing accounts for")
