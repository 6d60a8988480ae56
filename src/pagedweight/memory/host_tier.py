"""The host tier: every plane and table of one rank, always whole (DESIGN decision 7).

Planes never change and the host keeps all of them, so an offload copies nothing out and a reload is
one copy in. Rows are numbered as in `core.size_table.BlockIndex`, with local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pagedweight.core.geometry import (
    DOWN,
    KINDS,
    MAX_BITS,
    MIN_BITS,
    TILE_COLS,
    TILE_ROWS,
    LayerShape,
    part_columns,
    round_up,
)
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.memory.interface import Bytes

if TYPE_CHECKING:
    from pagedweight.checkpoint.reader import Checkpoint


ITEMS = MAX_BITS + (MAX_BITS - MIN_BITS + 1)
"""Items of a row: planes 0..7, then the tables of levels 2..8."""


def table_item(bits: int) -> int:
    """Item number of the lookup table of level `bits`."""
    return MAX_BITS + bits - MIN_BITS


class HostTier(Protocol):
    """Where a reload reads from.

    index: names rows; shape: one layer's part on this rank; sizes: levels and bytes.
    """

    index: BlockIndex
    shape: LayerShape
    sizes: SizeTable

    def plane(self, row: int, plane: int) -> Bytes:
        """Plane `plane` (0 = most significant) of a row: `plane_bytes` bytes, any strides."""
        ...

    def table(self, row: int, bits: int) -> Bytes:
        """The lookup table of level `bits` of a row: `table_bytes(bits)` bytes, any strides."""
        ...


class CheckpointTier:
    """A rank's part of a mapped checkpoint: some experts of some layers, cut along the intermediate
    width."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        experts: Sequence[int] | None = None,
        rank: int = 0,
        ranks: int = 1,
        layers: Sequence[int] | None = None,
    ) -> None:
        """`experts`: global ids in the order of local ids, all when None; `layers`: positions among
        the MoE layers, all when None.

        `rank` of `ranks`: the tensor-parallel cut. ValueError when the width cannot be cut so.
        """
        whole = checkpoint.shape
        self._experts = tuple(range(whole.experts) if experts is None else experts)
        self._whole = whole
        cut = whole.part(rank, ranks)
        self.shape = LayerShape(len(self._experts), cut.hidden, cut.intermediate)
        positions = range(len(checkpoint.moe_layers)) if layers is None else layers
        self.index = BlockIndex(len(positions), len(self._experts))
        self.sizes = SizeTable.of(self.shape, checkpoint.bits)
        self._columns = part_columns(whole.intermediate, rank, ranks)
        self._layers = [checkpoint.layer(position) for position in positions]

    def plane(self, row: int, plane: int) -> Bytes:
        layer, expert, kind = self.index.block(row)
        words = self._layers[layer].planes[KINDS[kind]][plane, self._experts[expert]]
        return _bytes(self._cut_plane(words, kind))

    def table(self, row: int, bits: int) -> Bytes:
        layer, expert, kind = self.index.block(row)
        table = self._layers[layer].tables[KINDS[kind]][bits][self._experts[expert]]
        return _bytes(table if kind == DOWN else self._cut_rows(table, 1))

    def _cut_plane(self, words: np.ndarray, kind: int) -> np.ndarray:
        """Words [R, C, 32] of one plane to this rank's: row tiles of gate_up, columns of down."""
        start, stop = self._columns
        if kind == DOWN:
            return words[:, start // TILE_COLS : round_up(stop, TILE_COLS) // TILE_COLS]
        return self._cut_rows(words, TILE_ROWS)

    def _cut_rows(self, array: np.ndarray, unit: int) -> np.ndarray:
        """Rows of gate and the same rows of up; `array`'s first axis counts `unit` rows."""
        start, stop = self._columns
        halves = array.reshape(2, -1, *array.shape[1:])
        return halves[:, start // unit : round_up(stop, TILE_ROWS) // unit]


def _bytes(array: np.ndarray) -> Bytes:
    """uint8 view of an array whose last axis is contiguous."""
    view: Bytes = array.view(np.uint8)
    return view
