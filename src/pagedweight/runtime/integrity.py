"""What must hold on a rank at every safe boundary, across page table, slots, arenas and kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pagedweight.core.geometry import KINDS, MAX_BITS
from pagedweight.core.page_table import Moving, PageState, WeightPageTable
from pagedweight.errors import listing
from pagedweight.memory.host_tier import table_item
from pagedweight.runtime.messages import Stage
from pagedweight.runtime.weights import ABSENT, WeightMemory, piece
from pagedweight.runtime.worker import MemoryWorker


def check_worker(worker: MemoryWorker, contents: bool = False) -> None:
    """Raise AssertionError with every violated invariant; `contents` also compares all bytes."""
    weights, table = worker.mover.weights, worker.mover.table
    table.check_integrity()
    holders = {arena.name: arena.backing.pages() for arena in weights.arenas}
    for arena in weights.arenas:
        arena.check_integrity()
    if worker.kv:
        worker.kv.check_integrity()
        holders[worker.kv.backing.span.name] = worker.kv.backing.pages()
    weights.pool.check_integrity(holders)
    found = [*_slots(weights, table), *_owners(weights), *_kernel_tables(weights, table)]
    if contents:
        found += _contents(worker)
    if found:
        raise AssertionError("rank memory:\n  " + "\n  ".join(found))


def _slots(weights: WeightMemory, table: WeightPageTable) -> Iterator[str]:
    """A piece has a slot exactly when the page table says so; a retiring one has lost it."""
    retiring = (table.moving == Moving.RETIRING)[:, None]
    levels = [table_item(bits) for bits in table.sizes.levels]
    states = np.concatenate([table.plane_states, table.table_states], axis=1)
    items = [*range(table.sizes.planes), *levels]
    expect = (states == PageState.DEVICE) | ((states == PageState.IN_TRANSFER) & ~retiring)
    wrong = np.argwhere(expect != (weights.slots[:, items] != ABSENT)).tolist()
    if wrong:
        names = (f"{table.index.name(row)} item {items[column]}" for row, column in wrong)
        yield f"slots and page states differ: {listing(names)}"


def _owners(weights: WeightMemory) -> Iterator[str]:
    """Arenas and slots tell the same story, both ways."""
    for row, item in np.argwhere(weights.slots != ABSENT).tolist():
        number = piece(row, item)
        if weights.arena_of(number).owner(int(weights.slots[row, item])) != number:
            yield f"row {row} item {item}: its slot belongs to somebody else"
    used = sum(arena.used for arena in weights.arenas)
    known = int(np.count_nonzero(weights.slots != ABSENT)) + weights.stray_slots
    if used != known:
        yield f"{used} slots are used and {known} are known"


def _kernel_tables(weights: WeightMemory, table: WeightPageTable) -> Iterator[str]:
    """Kernels read the committed bits, at the addresses where the pieces lie."""
    read = weights.kernel_tables.on_device()
    if not np.array_equal(read.bits, table.committed_bits):
        yield "kernels read other bits than the committed ones"
        return
    for row, bits in enumerate(table.committed_bits.tolist()):
        planes = [weights.address(piece(row, p)) for p in range(bits)] + [0] * (MAX_BITS - bits)
        if read.planes[row].tolist() != planes:
            yield f"{table.index.name(row)}: plane addresses"
        if read.tables[row] != weights.address(piece(row, table_item(bits))):
            yield f"{table.index.name(row)}: table address"


def _contents(worker: MemoryWorker) -> Iterator[str]:
    """Every piece that is there and not being copied is the host tier's, byte by byte."""
    weights = worker.mover.weights
    coming = worker.mover.pieces_in(Stage.COPYING)
    for row, item in np.argwhere(weights.slots != ABSENT).tolist():
        number = piece(row, item)
        if number in coming:
            continue
        source = np.ascontiguousarray(weights.source(number)).reshape(-1)
        there = weights.device.read(weights.address(number), source.nbytes)
        if not np.array_equal(there, source):
            yield f"row {row} ({KINDS[row % len(KINDS)]}) item {item}: contents"
