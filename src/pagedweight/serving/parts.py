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
    """This rank's contiguous cut of planes [n, R, C, 32] or of tables [(n,) padded rows, 2^b].

    gate_up is cut by rows, gate and up alike; down along its input, by column tiles, so its table
    is whole on every rank. No cut splits a tile (docs/format.md). n: planes, or experts.
    """
    start, stop = part_columns(whole.intermediate, part.rank, part.ranks)
    if array.ndim < 4:
        return _part_of_tables(array, start, stop, kind)
    if kind == DOWN:
        tiles = slice(start // TILE_COLS, round_up(stop, TILE_COLS) // TILE_COLS)
        return np.ascontiguousarray(array[:, :, tiles])
    halves = array.reshape(array.shape[0], 2, -1, *array.shape[2:])
    tiles = slice(start // TILE_ROWS, round_up(stop, TILE_ROWS) // TILE_ROWS)
    cut = np.ascontiguousarray(halves[:, :, tiles])
    return cut.reshape(array.shape[0], -1, *array.shape[2:])


def _part_of_tables(array: np.ndarray, start: int, stop: int, kind: int) -> np.ndarray:
    if kind == DOWN:
        return np.ascontiguousarray(array)
    leading, centroids = array.shape[:-2], array.shape[-1]
    halves = array.reshape(*leading, 2, -1, centroids)
    cut = np.ascontiguousarray(halves[..., start : round_up(stop, TILE_ROWS), :])
    return cut.reshape(*leading, -1, centroids)
