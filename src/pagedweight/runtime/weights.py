"""Expert weights of one rank on the device: which pieces are there, and what kernels read.

A piece is one plane or one lookup table of one linear block; its number is row * ITEMS + item.
Pieces live in dense arenas, one for the planes of a kind and one for the tables of a kind and
level; `slots[row, item]` says where. Nothing here decides: the mover says what comes, what goes
and when bits change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from pagedweight.core.geometry import KINDS, MAX_BITS, MIN_BITS
from pagedweight.core.size_class import SizeClassPages, SlotCounts
from pagedweight.core.size_table import IntArray
from pagedweight.errors import Transient, UserError
from pagedweight.kernels.contract import BlockTable
from pagedweight.memory.arena import NO_MOVES, Arena, Moves
from pagedweight.memory.attempts import all_of
from pagedweight.memory.host_tier import ITEMS, HostTier, table_item
from pagedweight.memory.interface import Bytes, Completion, Copy, Device
from pagedweight.memory.pinned_tier import PinnedTier
from pagedweight.memory.pool import PagePool
from pagedweight.runtime.counters import Counters
from pagedweight.runtime.kernel_tables import KernelTables

ABSENT = -1

Pieces = IntArray
"""Piece numbers, int64 [n]."""


def piece(row: int, item: int) -> int:
    """Number of a piece; `item` is a plane, or `table_item(bits)`."""
    return row * ITEMS + item


@dataclass(frozen=True, eq=False)
class Arrival:
    """Pieces on their way in: they have their slots, pinned, until `copied` is done."""

    pieces: Pieces
    slots: IntArray
    copied: Completion
    nbytes: int


@dataclass
class WeightMemory:
    """Arenas, slots and kernel tables; `tier` holds everything, `pool` the memory."""

    device: Device
    pool: PagePool
    tier: HostTier
    torch_device: torch.device | str = "cpu"
    poison: bool = False
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        rows = self.tier.index.rows
        self.slots: NDArray[np.int32] = np.full((rows, ITEMS), ABSENT, np.int32)
        self.kernel_tables = KernelTables(self.device, self.tier.index, self.torch_device)
        self.arenas: list[Arena] = []
        self._arena_at = np.full((len(KINDS), ITEMS), ABSENT, np.int64)
        for kind in range(len(KINDS)):
            self._make_arenas(kind)
        self._base = self._by_item([arena.backing.span.base for arena in self.arenas])
        self._slot_bytes = self._by_item([arena.slot_bytes for arena in self.arenas])
        self._strays: list[Arrival] = []

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """The kernels' table of each layer; its storage never moves."""
        return self.kernel_tables.layers

    def _make_arenas(self, kind: int) -> None:
        """All planes of a kind share one arena, each level's tables have their own."""
        sizes, blocks = self.tier.sizes, self.tier.index.rows // len(KINDS)
        self._arena_at[kind, : sizes.planes] = len(self.arenas)
        self._add(f"{KINDS[kind]}.planes", sizes.plane_bytes[kind], blocks * sizes.planes)
        for level, bits in enumerate(sizes.levels):
            self._arena_at[kind, table_item(bits)] = len(self.arenas)
            self._add(f"{KINDS[kind]}.table.{bits}", int(sizes.table_bytes[kind, level]), blocks)

    def _add(self, name: str, slot_bytes: int, capacity: int) -> None:
        # Addresses cost nothing: twice what can be in use leaves room for copies given up.
        slots, moved = 2 * capacity, self._moved
        self.arenas.append(
            Arena(self.device, self.pool, name, slot_bytes, slots, moved, self.poison)
        )

    def _by_item(self, of_arena: list[int]) -> IntArray:
        """A number of each arena as int64 [kinds, ITEMS]; 0 where there is no arena."""
        out: IntArray = np.array([*of_arena, 0], np.int64)[self._arena_at]
        return out

    def _moved(self, owners: IntArray, slots: IntArray) -> None:
        self.slots[np.divmod(owners, ITEMS)] = slots

    # -- pieces ----------------------------------------------------------------------------------

    def arena_of(self, number: int) -> Arena:
        row, item = divmod(number, ITEMS)
        return self.arenas[int(self._arena_at[row % len(KINDS), item])]

    def address(self, number: int) -> int:
        """Where a piece that is there lies now; it may move at the next boundary."""
        return self.arena_of(number).address(int(self.slots[divmod(number, ITEMS)]))

    def source(self, number: int) -> Bytes:
        """The piece in the host tier."""
        row, item = divmod(number, ITEMS)
        if item < MAX_BITS:
            return self.tier.plane(row, item)
        return self.tier.table(row, item - MAX_BITS + MIN_BITS)

    def missing(self, rows: ArrayLike, bits: ArrayLike) -> Pieces:
        """Pieces that the device lacks for `rows` to be read at `bits`."""
        picked = np.asarray(rows, np.int64)
        return _numbers(picked, _needed(bits) & (self.slots[picked] == ABSENT))

    def surplus(self, rows: ArrayLike, bits: ArrayLike) -> Pieces:
        """Pieces of `rows` on the device that `bits` do not need."""
        picked = np.asarray(rows, np.int64)
        return _numbers(picked, ~_needed(bits) & (self.slots[picked] != ABSENT))

    @property
    def held_back(self) -> int:
        """Pages that the last `reclaim` could have taken back, had it been allowed more."""
        return sum(arena.backing.held_back for arena in self.arenas)

    @property
    def stray_slots(self) -> int:
        """Slots that abandoned copies still write to."""
        return sum(len(arrival.slots) for arrival in self._strays)

    def _groups(self, pieces: Pieces) -> Iterator[tuple[Arena, IntArray]]:
        """(arena, positions in `pieces`) for every arena that has some."""
        rows, items = np.divmod(pieces, ITEMS)
        at = self._arena_at[rows % len(KINDS), items]
        for index in np.unique(at):
            yield self.arenas[index], np.flatnonzero(at == index)

    # -- in --------------------------------------------------------------------------------------

    def load(self, bits: NDArray[np.int32]) -> None:
        """Start-up: bring in every row at `bits` [rows] and commit; blocks until it is there.

        UserError with both numbers when the pool is too small.
        """
        need, have = self.pages_at(bits), self.pool.can_take()
        if need > have:
            raise UserError(
                f"the expert weights of this plan need {need} pages of {self.pool.page_bytes} "
                f"bytes and the memory budget leaves {have}: raise the budget or lower the bits"
            )
        for rows in np.split(np.arange(len(bits)), self.tier.index.layers):
            arrival = self.bring_in(self.missing(rows, bits[rows]))
            arrival.copied.wait()
            self.landed(arrival)
        self.commit(np.arange(len(bits)), bits)

    def pages_at(self, bits: NDArray[np.int32]) -> int:
        """Pages that rows at `bits` hold, each arena rounded up to whole ones."""
        classes = SizeClassPages.of(self.tier.sizes, self.pool.page_bytes)
        held = classes.held_by(SlotCounts.of_bits(self.tier.sizes, bits))
        return held // self.pool.page_bytes

    def left_at(self, bits: NDArray[np.int32]) -> int:
        """Pages that KV can have while rows are settled at `bits`: at all floors, the most."""
        return self.pool.total - self.pool.reserve - self.pages_at(bits)

    def bring_in(self, pieces: Pieces, urgent: bool = False) -> Arrival:
        """Give `pieces` slots and start their copies; all or none. Raises PoolShort, Transient."""
        slots = np.full(len(pieces), ABSENT, np.int64)
        groups = list(self._groups(pieces))
        try:
            for arena, at in groups:
                slots[at] = arena.allocate(pieces[at].tolist(), urgent)
            copied = self.device.upload(self._copies(pieces, slots))
        except Transient:
            for arena, at in groups:
                arena.discard([slot for slot in slots[at].tolist() if slot != ABSENT])
            raise
        self.slots[np.divmod(pieces, ITEMS)] = slots
        for arena, at in groups:
            arena.pin(slots[at].tolist())
        rows, items = np.divmod(pieces, ITEMS)
        nbytes = int(self._slot_bytes[rows % len(KINDS), items].sum())
        return Arrival(pieces, slots, copied, nbytes)

    def _copies(self, pieces: Pieces, slots: IntArray) -> Sequence[Copy]:
        """From the host tier to `slots`."""
        targets = self._addresses(pieces, slots)
        if isinstance(self.tier, PinnedTier):
            return self.tier.copies(*np.divmod(pieces, ITEMS), targets)
        sources = [self.source(number) for number in pieces.tolist()]
        return [*map(Copy, targets.tolist(), sources)]

    def landed(self, arrival: Arrival) -> None:
        """The copies are over, well or badly: the pieces may be moved or dropped now."""
        for arena, at in self._groups(arrival.pieces):
            arena.unpin(arrival.slots[at].tolist())

    def abandon(self, arrival: Arrival) -> None:
        """Nobody waits for `arrival` any more; its slots stay taken until its copies are over."""
        self.slots[np.divmod(arrival.pieces, ITEMS)] = ABSENT
        self._strays.append(arrival)

    def sweep_strays(self) -> None:
        """Free the slots of abandoned arrivals whose copies are over.

        With poison on, raises Transient after they are free.
        """
        over = [arrival for arrival in self._strays if _is_over(arrival.copied)]
        self._strays = [arrival for arrival in self._strays if arrival not in over]
        self.counters.stale_copies += len(over)
        for arrival in over:
            self.landed(arrival)
        all_of(
            partial(arena.free, arrival.slots[at].tolist())
            for arrival in over
            for arena, at in self._groups(arrival.pieces)
        )

    # -- what kernels read -----------------------------------------------------------------------

    def commit(self, rows: ArrayLike, bits: ArrayLike) -> None:
        """In order: `rows` are read at `bits`, one write. All their pieces must be there.

        Raises Transient; then kernels go on reading what they read before.
        """
        picked = np.asarray(rows, np.int64)
        self._stage(picked, np.asarray(bits, np.int64), self.slots[picked])
        self.kernel_tables.commit()

    def drop(self, pieces: Pieces) -> None:
        """`pieces`, read by no step submitted from now on, leave; with poison, Transient after."""
        where = np.divmod(pieces, ITEMS)
        slots = self.slots[where]
        self.slots[where] = ABSENT
        all_of(partial(arena.free, slots[at].tolist()) for arena, at in self._groups(pieces))

    def compact(self) -> None:
        """In order: close the holes of all arenas and tell the kernels, one write.

        Raises Transient; then the holes stay until the next call (with poison on, it may also be
        raised after they are closed).
        """
        planned = {arena: moves for arena in self.arenas if len(moves := arena.moves())}
        for arena, moves in planned.items():
            arena.copy_moves(moves)
        if planned:
            self._stage_moves([*planned.values()])
            self.kernel_tables.commit()
        for arena, moves in planned.items():
            self.counters.compacted_bytes += arena.slot_bytes * len(moves)
        all_of(partial(arena.settle, planned.get(arena, NO_MOVES)) for arena in self.arenas)

    def release(self) -> None:
        """Pages past the ends of the arenas go as soon as everything submitted has finished."""
        slack = [arena for arena in self.arenas if arena.slack]
        if slack:
            fence = self.device.fence()
            for arena in slack:
                arena.release(fence)

    def reclaim(self, most: int | None = None) -> int:
        """Pages that went back to the pool. Raises Transient after having tried all arenas."""
        before = self.pool.free

        def of_arena(arena: Arena) -> int:
            done = self.pool.free - before
            return arena.backing.reclaim(None if most is None else max(0, most - done))

        try:
            all_of(partial(of_arena, arena) for arena in self.arenas)
        finally:
            self.counters.reclaimed_pages += self.pool.free - before
        return self.pool.free - before

    def _stage_moves(self, moves: Sequence[Moves]) -> None:
        """Stage the rows that pieces move in, at the bits that they are read at."""
        rows, items = np.divmod(np.concatenate([move.owners for move in moves]), ITEMS)
        changed, at = np.unique(rows, return_inverse=True)
        slots = self.slots[changed]
        slots[at, items] = np.concatenate([move.targets for move in moves])
        self._stage(changed, self.kernel_tables.written.bits[changed].astype(np.int64), slots)

    def _stage(self, rows: IntArray, bits: IntArray, slots: NDArray[np.int32]) -> None:
        """Stage `rows` at `bits`; planes that are not read get address 0."""
        staged, kinds = self.kernel_tables.staged, rows % len(KINDS)
        there = self._base[kinds] + slots * self._slot_bytes[kinds]
        staged.bits[rows] = bits
        staged.planes[rows] = np.where(np.arange(MAX_BITS) < bits[:, None], there[:, :MAX_BITS], 0)
        staged.tables[rows] = there[np.arange(len(rows)), MAX_BITS + bits - MIN_BITS]

    def _addresses(self, pieces: Pieces, slots: IntArray) -> IntArray:
        rows, items = np.divmod(pieces, ITEMS)
        out: IntArray = (
            self._base[rows % len(KINDS), items]
            + slots * self._slot_bytes[rows % len(KINDS), items]
        )
        return out


def _needed(bits: ArrayLike) -> NDArray[np.bool_]:
    """Items that rows at `bits` need, bool [n, ITEMS]: planes below, and the level's table."""
    levels = np.asarray(bits, np.int64)[:, None]
    items = np.arange(ITEMS)
    out: NDArray[np.bool_] = (items < levels) | (items == MAX_BITS + levels - MIN_BITS)
    return out


def _numbers(rows: IntArray, mask: NDArray[np.bool_]) -> Pieces:
    at, items = np.nonzero(mask)
    out: Pieces = rows[at] * ITEMS + items
    return out


def _is_over(copied: Completion) -> bool:
    """Whether an abandoned copy has ended; nobody cares how."""
    try:
        return copied.done()
    except Transient:
        return True
