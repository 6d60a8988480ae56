"""Which part of a layer a rank holds: a set of experts, and a cut of each expert's width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedweight.core.geometry import (
    DOWN,
    TILE_COLS,
    TILE_ROWS,
    LayerShape,
    part_columns,
    round_up,
)


@dataclass(frozen=True)
class Part:
    """`experts`: global ids in the order of local ids; `rank` of `ranks` in tensor parallelism."""

    experts: tuple[int, ...]
    rank: int = 0
    ranks: int = 1

    def shape(self, whole: LayerShape) -> LayerShape:
        """Shape of this part of a layer of shape `whole`."""
        cut = whole.part(self.rank, self.ranks)
        return LayerShape(len(self.experts), cut.hidden, cut.intermediate)


def part_of(array: np.ndarray, whole: LayerShape, kind: int, part: Part) -> np.ndarray:
    """This rank's contiguous cut of planes [b, R, C, 32] or of a table [padded rows, 2^b].

    gate_up is cut by rows, gate and up alike; down along its input, by column tiles, so its table
    is whole on every rank. No cut splits a tile (docs/format.md).
    """
    start, stop = part_columns(whole.intermediate, part.rank, part.ranks)
    if kind == DOWN:
        if array.ndim == 2:
            return np.ascontiguousarray(array)
        tiles = slice(start // TILE_COLS, round_up(stop, TILE_COLS) // TILE_COLS)
        return np.ascontiguousarray(array[:, :, tiles])
    if array.ndim == 2:
        halves = array.reshape(2, -1, array.shape[-1])
        rows = slice(start, round_up(stop, TILE_ROWS))
        return np.ascontiguousarray(halves[:, rows]).reshape(-1, array.shape[-1])
    halves = array.reshape(array.shape[0], 2, -1, *array.shape[2:])
    tiles = slice(start // TILE_ROWS, round_up(stop, TILE_ROWS) // TILE_ROWS)
    cut = np.ascontiguousarray(halves[:, :, tiles])
    return cut.reshape(array.shape[0], -1, *array.shape[2:])
