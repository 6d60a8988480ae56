"""Expert weights of one rank on the device: which pieces are there, and what kernels read.

A piece is one plane or one lookup table of one linear block. Pieces live in dense arenas, one for
the planes of a kind and one for the tables of a kind and level; `slots[row, item]` says where.
Nothing here decides: the mover says what comes, what goes and when bits change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from pagedweight.core.geometry import KINDS, MAX_BITS, MIN_BITS
from pagedweight.core.size_class import SizeClassPages, SlotCounts
from pagedweight.errors import Transient, UserError
from pagedweight.kernels.contract import BlockTable
from pagedweight.memory.arena import Arena, Move
from pagedweight.memory.attempts import all_of
from pagedweight.memory.host_tier import HostTier
from pagedweight.memory.interface import Bytes, Completion, Copy, Device
from pagedweight.memory.pool import PagePool
from pagedweight.runtime.counters import Counters
from pagedweight.runtime.kernel_tables import KernelTables

ITEMS = MAX_BITS + (MAX_BITS - MIN_BITS + 1)
"""Columns of `slots`: planes 0..7, then the tables of levels 2..8."""
ABSENT = -1

Piece = tuple[int, int]
"""(row, item)."""


def table_item(bits: int) -> int:
    """Item number of the lookup table of level `bits`."""
    return MAX_BITS + bits - MIN_BITS


@dataclass(frozen=True)
class Arrival:
    """Pieces on their way in: they have their slots, pinned, until `copied` is done."""

    pieces: tuple[Piece, ...]
    slots: tuple[int, ...]
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
        self._arenas = {
            (kind, item): arena
            for kind in range(len(KINDS))
            for item, arena in self._arenas_of(kind).items()
        }
        self._strays: list[Arrival] = []

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """The kernels' table of each layer; its storage never moves."""
        return self.kernel_tables.layers

    @property
    def arenas(self) -> list[Arena]:
        return list(dict.fromkeys(self._arenas.values()))

    def _arenas_of(self, kind: int) -> dict[int, Arena]:
        """By item: all planes share one arena, each level's tables have their own."""
        sizes, blocks = self.tier.sizes, self.tier.index.rows // len(KINDS)
        plane = self._arena(f"{KINDS[kind]}.planes", sizes.plane_bytes[kind], blocks * sizes.planes)
        found = dict.fromkeys(range(sizes.planes), plane)
        for level, bits in enumerate(sizes.levels):
            nbytes = int(sizes.table_bytes[kind, level])
            found[table_item(bits)] = self._arena(f"{KINDS[kind]}.table.{bits}", nbytes, blocks)
        return found

    def _arena(self, name: str, slot_bytes: int, capacity: int) -> Arena:
        # Addresses cost nothing: twice what can be in use leaves room for copies given up.
        slots, moved = 2 * capacity, self._moved
        return Arena(self.device, self.pool, name, slot_bytes, slots, moved, self.poison)

    def _moved(self, owner: int, slot: int) -> None:
        row, item = divmod(owner, ITEMS)
        self.slots[row, item] = slot

    def arena_of(self, piece: Piece) -> Arena:
        row, item = piece
        return self._arenas[row % len(KINDS), item]

    def address(self, piece: Piece) -> int:
        """Where a piece that is there lies now; it may move at the next boundary."""
        return self.arena_of(piece).address(int(self.slots[piece]))

    @staticmethod
    def owner_of(piece: Piece) -> int:
        """The number by which arenas know a piece."""
        return piece[0] * ITEMS + piece[1]

    @property
    def stray_slots(self) -> int:
        """Slots that abandoned copies still write to."""
        return sum(len(arrival.slots) for arrival in self._strays)

    def source(self, piece: Piece) -> Bytes:
        """The piece in the host tier."""
        row, item = piece
        if item < MAX_BITS:
            return self.tier.plane(row, item)
        return self.tier.table(row, item - MAX_BITS + MIN_BITS)

    def missing(self, row: int, bits: int) -> list[Piece]:
        """Pieces that the device lacks for `row` at `bits`: the table, then planes."""
        items = [table_item(bits), *range(bits)]
        return [(row, item) for item in items if self.slots[row, item] == ABSENT]

    def surplus(self, row: int, bits: int) -> list[Piece]:
        """Pieces of `row` on the device that `bits` does not need."""
        needed = {table_item(bits), *range(bits)}
        there = np.flatnonzero(self.slots[row] != ABSENT).tolist()
        return [(row, item) for item in there if item not in needed]

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
            pieces = [piece for row in rows for piece in self.missing(int(row), int(bits[row]))]
            arrival = self.bring_in(pieces)
            arrival.copied.wait()
            self.landed(arrival)
        self.commit(range(len(bits)), bits.tolist())

    def pages_at(self, bits: NDArray[np.int32]) -> int:
        """Pages that rows at `bits` hold, each arena rounded up to whole ones."""
        classes = SizeClassPages.of(self.tier.sizes, self.pool.page_bytes)
        held = classes.held_by(SlotCounts.of_bits(self.tier.sizes, bits))
        return held // self.pool.page_bytes

    def bring_in(self, pieces: Sequence[Piece], urgent: bool = False) -> Arrival:
        """Give `pieces` slots and start their copies; all or none. Raises PoolShort, Transient."""
        taken: list[tuple[Piece, int]] = []
        try:
            for arena, some in self._by_arena(pieces).items():
                owners = [self.owner_of(piece) for piece in some]
                taken += zip(some, arena.allocate(owners, urgent), strict=True)
            copies = [
                Copy(self.arena_of(piece).address(slot), self.source(piece))
                for piece, slot in taken
            ]
            copied = self.device.upload(copies)
        except Transient:
            for piece, slot in taken:
                self.arena_of(piece).discard([slot])
            raise
        for (row, item), slot in taken:
            self.slots[row, item] = slot
            self.arena_of((row, item)).pin([slot])
        nbytes = sum(copy.source.nbytes for copy in copies)
        return Arrival(tuple(p for p, _ in taken), tuple(s for _, s in taken), copied, nbytes)

    def landed(self, arrival: Arrival) -> None:
        """The copies are over, well or badly: the pieces may be moved or dropped now."""
        for piece, slot in zip(arrival.pieces, arrival.slots, strict=True):
            self.arena_of(piece).unpin([slot])

    def abandon(self, arrival: Arrival) -> None:
        """Nobody waits for `arrival` any more; its slots stay taken until its copies are over."""
        for row, item in arrival.pieces:
            self.slots[row, item] = ABSENT
        self._strays.append(arrival)

    def sweep_strays(self) -> None:
        """Free the slots of abandoned arrivals whose copies are over.

        With poison on, raises Transient after they are free.
        """
        over = [arrival for arrival in self._strays if _is_over(arrival.copied)]
        self._strays = [arrival for arrival in self._strays if arrival not in over]
        for arrival in over:
            self.landed(arrival)
        self.counters.stale_copies += len(over)
        all_of(
            partial(self.arena_of(piece).free, [slot])
            for arrival in over
            for piece, slot in zip(arrival.pieces, arrival.slots, strict=True)
        )

    # -- what kernels read -----------------------------------------------------------------------

    def commit(self, rows: Sequence[int], bits: Sequence[int]) -> None:
        """In order: `rows` are read at `bits`, one write. All their pieces must be there.

        Raises Transient; then kernels go on reading what they read before.
        """
        for row, level in zip(rows, bits, strict=True):
            self._stage(row, level, self.slots[row])
        self.kernel_tables.commit()

    def drop(self, pieces: Iterable[Piece]) -> None:
        """`pieces`, read by no step submitted from now on, leave; with poison, Transient after."""
        freed: dict[Arena, list[int]] = {}
        for arena, some in self._by_arena(pieces).items():
            freed[arena] = [int(self.slots[row, item]) for row, item in some]
            for row, item in some:
                self.slots[row, item] = ABSENT
        all_of(partial(arena.free, slots) for arena, slots in freed.items())

    def compact(self) -> None:
        """In order: close the holes of all arenas and tell the kernels, one write.

        Raises Transient; then the holes stay until the next call (with poison on, it may also be
        raised after they are closed).
        """
        planned = {arena: moves for arena in self.arenas if (moves := arena.moves())}
        for arena, moves in planned.items():
            arena.copy_moves(moves)
        if planned:
            self._stage_moves([move for moves in planned.values() for move in moves])
            self.kernel_tables.commit()
        for arena, moves in planned.items():
            self.counters.compacted_bytes += arena.slot_bytes * len(moves)
        all_of(partial(arena.settle, planned.get(arena, [])) for arena in self.arenas)

    def release(self) -> None:
        """Pages past the ends of the arenas go as soon as everything submitted has finished."""
        slack = [arena for arena in self.arenas if arena.slack]
        if slack:
            fence = self.device.fence()
            for arena in slack:
                arena.release(fence)

    def reclaim(self) -> int:
        """Pages that went back to the pool. Raises Transient after having tried all arenas."""
        before = self.pool.free
        try:
            all_of(arena.backing.reclaim for arena in self.arenas)
        finally:
            self.counters.reclaimed_pages += self.pool.free - before
        return self.pool.free - before

    def _stage_moves(self, moves: Sequence[Move]) -> None:
        changed: dict[int, NDArray[np.int32]] = {}
        for move in moves:
            row, item = divmod(move.owner, ITEMS)
            changed.setdefault(row, self.slots[row].copy())[item] = move.target
        for row, slots in changed.items():
            self._stage(row, int(self.kernel_tables.written.bits[row]), slots)

    def _stage(self, row: int, bits: int, slots: NDArray[np.int32]) -> None:
        """Stage `row` at `bits`; planes that are not read get address 0."""
        staged, kind = self.kernel_tables.staged, row % len(KINDS)
        planes, table = self._arenas[kind, 0], self._arenas[kind, table_item(bits)]
        staged.bits[row] = bits
        staged.planes[row] = 0
        staged.planes[row, :bits] = [planes.address(s) for s in slots[:bits].tolist()]
        staged.tables[row] = table.address(int(slots[table_item(bits)]))

    def _by_arena(self, pieces: Iterable[Piece]) -> dict[Arena, list[Piece]]:
        found: dict[Arena, list[Piece]] = defaultdict(list)
        for piece in pieces:
            found[self.arena_of(piece)].append(piece)
        return found


def _is_over(copied: Completion) -> bool:
    """Whether an abandoned copy has ended; nobody cares how."""
    try:
        return copied.done()
    except Transient:
        return True
