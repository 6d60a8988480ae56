"""A host tier in pinned memory: what a reload reads is one copy of the GPU's copy engine away.

    layer block   | row 0: planes 0 .. P-1, tables of all levels | row 1: ... |      one a layer

Every piece of a kind lies at the same offset of its row, so the addresses of a thousand pieces are
one numpy expression. The tables of all levels are kept: which one is committed changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pagedweight.core.geometry import KINDS
from pagedweight.core.size_table import IntArray, SizeTable
from pagedweight.errors import UserError
from pagedweight.memory.host_tier import ITEMS, HostTier, table_item
from pagedweight.memory.interface import Bytes, PinnedCopies
from pagedweight.memory.limits import available_bytes

_THREADS = 8


def row_bytes(sizes: SizeTable) -> IntArray:
    """Bytes of a row with all planes and all tables, int64 [kinds]."""
    planes = np.array(sizes.plane_bytes, np.int64) * sizes.planes
    out: IntArray = planes + sizes.table_bytes.sum(axis=1)
    return out


def tier_bytes(tier: HostTier) -> int:
    """Host bytes that pinning `tier` takes."""
    return int(row_bytes(tier.sizes).sum()) * tier.index.layers * tier.index.experts


def check_host_budget(need: int, budget: int | None, have: int) -> None:
    """UserError, with the numbers, when pinning `need` bytes is over `budget` or what is there."""
    if budget is not None and need > budget:
        raise UserError(
            f"the host tier needs {need} bytes of pinned memory (all planes and tables of this "
            f"rank) and --host-memory allows {budget}: allow {need}, or give --pageable, which "
            "leaves them in the checkpoint's files and restores precision more slowly"
        )
    if need > have:
        raise UserError(
            f"the host tier needs {need} bytes of pinned memory and this process may take {have}: "
            "free some, or give --pageable, which leaves planes in the checkpoint's files and "
            "restores precision more slowly"
        )


class PinnedTier:
    """A copy of `tier` in memory that `allocate` gives; the same planes and tables."""

    def __init__(
        self, tier: HostTier, allocate: Callable[[int], Bytes], budget: int | None = None
    ) -> None:
        """Copies everything. UserError when that is over `budget` bytes or what the host has."""
        check_host_budget(tier_bytes(tier), budget, available_bytes())
        self.index, self.shape, self.sizes = tier.index, tier.shape, tier.sizes
        self._row_bytes = row_bytes(self.sizes)
        self._offsets, self._sizes = _layout(self.sizes)
        each = tier_bytes(tier) // tier.index.layers
        self._layers = [allocate(each) for _ in range(tier.index.layers)]
        self._bases = np.array([block.ctypes.data for block in self._layers], np.int64)
        self._fill(tier)

    @property
    def nbytes(self) -> int:
        """Pinned bytes."""
        return sum(block.nbytes for block in self._layers)

    def plane(self, row: int, plane: int) -> Bytes:
        """See `HostTier`."""
        return self._piece(row, plane)

    def table(self, row: int, bits: int) -> Bytes:
        """See `HostTier`."""
        return self._piece(row, table_item(bits))

    def copies(self, rows: IntArray, items: IntArray, targets: IntArray) -> PinnedCopies:
        """Uploads of item items[i] of row rows[i] to address targets[i]."""
        kinds = rows % len(KINDS)
        layers, starts = self._start(rows)
        sources = self._bases[layers] + starts + self._offsets[kinds, items]
        return PinnedCopies(targets, sources, self._sizes[kinds, items], self)

    def _start(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Layer of each row, and where the row begins in the layer's block."""
        experts, kinds = np.divmod(rows, len(KINDS))
        layers, local = np.divmod(experts, self.index.experts)
        return layers, local * self._row_bytes.sum() + kinds * self._row_bytes[0]

    def _piece(self, row: int, item: int) -> Bytes:
        layers, starts = self._start(np.array([row], np.int64))
        kind = row % len(KINDS)
        first = int(starts[0] + self._offsets[kind, item])
        return self._layers[int(layers[0])][first : first + int(self._sizes[kind, item])]

    def _fill(self, tier: HostTier) -> None:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda layer: self._fill_layer(tier, layer), range(self.index.layers)))

    def _fill_layer(self, tier: HostTier, layer: int) -> None:
        rows = self.index.experts * len(KINDS)
        for row in range(layer * rows, (layer + 1) * rows):
            for plane in range(self.sizes.planes):
                _copy(self.plane(row, plane), tier.plane(row, plane))
            for bits in self.sizes.levels:
                _copy(self.table(row, bits), tier.table(row, bits))


def _layout(sizes: SizeTable) -> tuple[IntArray, IntArray]:
    """Offset in its row and bytes of every item, int64 [kinds, ITEMS]; absent items have 0."""
    nbytes = np.zeros((len(KINDS), ITEMS), np.int64)
    nbytes[:, : sizes.planes] = np.array(sizes.plane_bytes, np.int64)[:, None]
    for level, bits in enumerate(sizes.levels):
        nbytes[:, table_item(bits)] = sizes.table_bytes[:, level]
    return np.cumsum(nbytes, axis=1) - nbytes, nbytes


def _copy(target: Bytes, source: Bytes) -> None:
    np.copyto(target.reshape(source.shape), source)
