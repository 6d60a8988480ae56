"""One layer's planes and tables in memory, filled a linear block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pagedweight.checkpoint.packing import pack, pad_tables
from pagedweight.core.geometry import KINDS, LayerShape
from pagedweight.errors import listing

EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Bits that are all set in a NaN or an infinity of each type."""


class LayerBuffer:
    """planes by kind: uint32 [P, E, R, C, 32]; tables by kind and level: uint16 [E, rows, 2^b].

    Packing at once keeps the codes (a byte a weight) of one block alive, not of a layer.
    """

    def __init__(self, shape: LayerShape, bits: Sequence[int]) -> None:
        self.shape = shape
        self.bits = tuple(bits)
        self.blocks = dict(zip(KINDS, shape.blocks, strict=True))
        self.planes = {
            kind: np.zeros(
                (max(bits), shape.experts, block.row_tiles, block.col_tiles, 32), np.uint32
            )
            for kind, block in self.blocks.items()
        }
        self.tables = {
            kind: {b: np.zeros((shape.experts, block.padded_rows, 1 << b), np.uint16) for b in bits}
            for kind, block in self.blocks.items()
        }
        self._missing = {(e, kind) for e in range(shape.experts) for kind in KINDS}

    def put(
        self,
        expert: int,
        kind: str,
        codes: npt.NDArray[np.uint8],
        tables: Mapping[int, npt.NDArray[np.uint16]],
    ) -> None:
        """One block: codes [N, K] of max(bits) bits and, per level, raw centroids [N, 2^b]."""
        self.put_words(expert, kind, pack(codes, self.blocks[kind], max(self.bits)), tables)

    def put_words(
        self,
        expert: int,
        kind: str,
        words: npt.NDArray[np.uint32],
        tables: Mapping[int, npt.NDArray[np.uint16]],
    ) -> None:
        """The same with codes that are packed: words [P, R, C, 32] (`packing.pack`)."""
        if sorted(tables) != list(self.bits):
            raise ValueError(f"tables for levels {sorted(tables)}, expected {list(self.bits)}")
        block = self.blocks[kind]
        for b, table in tables.items():
            if table.dtype != np.uint16 or table.shape != (block.rows, 1 << b):
                raise ValueError(
                    f"{kind} table of level {b} is {table.dtype} {list(table.shape)}, "
                    f"expected uint16 {[block.rows, 1 << b]}"
                )
            self.tables[kind][b][expert] = pad_tables(table, block)
        self.planes[kind][:, expert] = words
        self._missing.discard((expert, kind))

    def data(self, table_dtype: str) -> Iterator[memoryview]:
        """The bytes of a layer file in the order of `layout.layer_entries`.

        Raises ValueError when a block was never put or a centroid is not finite.
        """
        if self._missing:
            gaps = listing(f"expert {e} {kind}" for e, kind in sorted(self._missing))
            raise ValueError(f"linear blocks that were never put: {gaps}")
        mask = EXPONENT[table_dtype]
        for kind, levels in self.tables.items():
            for b, table in levels.items():
                if ((table & mask) == mask).any():
                    raise ValueError(f"{kind} table of level {b} has a centroid that is not finite")
        for kind in KINDS:
            yield memoryview(self.planes[kind].astype("<u4", copy=False)).cast("B")
        for kind in KINDS:
            for b in self.bits:
                yield memoryview(self.tables[kind][b].astype("<u2", copy=False)).cast("B")
