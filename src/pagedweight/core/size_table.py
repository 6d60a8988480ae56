"""Where a linear block is a row, and how many bytes it holds at each level (paper 3.1, eq. 3).

Row i = (layer * E + expert) * 2 + kind, with `layer` the position among the MoE layers, so the two
kinds alternate and every per-row array is a view of [layers, E, kinds]. All blocks of a kind have
one shape and all rows have the same levels, because the checkpoint stores them so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.geometry import KINDS, MAX_BITS, MIN_BITS, LayerShape

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class BlockIndex:
    """Names rows: `layers` MoE layers of `experts` experts, two kinds each."""

    layers: int
    experts: int

    def __post_init__(self) -> None:
        if min(self.layers, self.experts) < 1:
            raise ValueError(f"no linear blocks: {self}")

    @property
    def rows(self) -> int:
        return self.layers * self.experts * len(KINDS)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[layers, experts, kinds]: what a per-row array reshapes to."""
        return (self.layers, self.experts, len(KINDS))

    def row(self, layer: int, expert: int, kind: int) -> int:
        """Row of linear block (layer position, expert, kind index)."""
        return (layer * self.experts + expert) * len(KINDS) + kind

    def block(self, row: int) -> tuple[int, int, int]:
        """(layer position, expert, kind index) of a row; the inverse of `row`."""
        expert_row, kind = divmod(row, len(KINDS))
        layer, expert = divmod(expert_row, self.experts)
        return layer, expert, kind

    def name(self, row: int) -> str:
        """A row for messages, as `layer 3 expert 17 down`."""
        layer, expert, kind = self.block(row)
        return f"layer {layer} expert {expert} {KINDS[kind]}"


@dataclass(frozen=True, eq=False)
class SizeTable:
    """M_i^b by kind: bytes on the device at each level, planes and the level's own lookup table.

    levels:      B_i, ascending and contiguous, the same for every row.
    plane_bytes: bytes of one plane by kind, (gate_up, down).
    table_bytes: int64 [kinds, levels], bytes of the lookup table of each level.
    resident:    int64 [kinds, levels], M_i^b of eq. 3 = b * plane_bytes + table_bytes.
    """

    levels: tuple[int, ...]
    plane_bytes: tuple[int, int]
    table_bytes: IntArray
    resident: IntArray = field(init=False)

    def __post_init__(self) -> None:
        low, high = (self.levels[0], self.levels[-1]) if self.levels else (0, 0)
        contiguous = self.levels == tuple(range(low, high + 1))
        if not contiguous or low < MIN_BITS or high > MAX_BITS:
            raise ValueError(
                f"levels {list(self.levels)} are not contiguous in {MIN_BITS}..{MAX_BITS}"
            )
        if self.table_bytes.shape != (len(KINDS), len(self.levels)):
            raise ValueError(f"table bytes of shape {self.table_bytes.shape} for {self.levels}")
        planes = np.outer(np.array(self.plane_bytes, np.int64), np.array(self.levels, np.int64))
        object.__setattr__(self, "resident", planes + self.table_bytes)

    @staticmethod
    def of(shape: LayerShape, levels: Sequence[int]) -> SizeTable:
        """Sizes of a layer's blocks (of one rank's part when `shape` is a part)."""
        tables = [[block.table_bytes(b) for b in levels] for block in shape.blocks]
        return SizeTable(
            levels=tuple(levels),
            plane_bytes=(shape.gate_up.plane_bytes, shape.down.plane_bytes),
            table_bytes=np.array(tables, np.int64),
        )

    @staticmethod
    def largest(shape: LayerShape, levels: Sequence[int], ranks: int) -> SizeTable:
        """Sizes that no rank's part of a block exceeds, when its width is cut for `ranks`.

        Parts differ in whole tiles, and a last tile may be narrow. Raises ValueError when the width
        cannot be cut so.
        """
        parts = [SizeTable.of(shape.part(rank, ranks), levels) for rank in range(ranks)]
        gate_up, down = (max(part.plane_bytes[kind] for part in parts) for kind in range(2))
        tables = np.max([part.table_bytes for part in parts], axis=0)
        return SizeTable(tuple(levels), (gate_up, down), tables)

    @property
    def planes(self) -> int:
        """P, planes stored: max(levels)."""
        return self.levels[-1]

    @property
    def lowest(self) -> int:
        return self.levels[0]

    def bytes_at(self, kind: int, bits: int) -> int:
        """M_i^b for one kind. Raises ValueError for a level that is not stored."""
        if bits not in self.levels:
            raise ValueError(f"{bits} bits is not one of the levels {list(self.levels)}")
        return int(self.resident[kind, bits - self.lowest])

    def delta(self, kind: int, bits: int, lower: int) -> int:
        """Bytes released by b -> b' (eq. 3); negative when b' > b, that is what a reload takes."""
        return self.bytes_at(kind, bits) - self.bytes_at(kind, lower)

    def by_row(self, bits: NDArray[np.int32]) -> IntArray:
        """M_i^{bits_i} of every row, int64 [rows]; `bits` int [rows], all of them levels."""
        level = bits - self.lowest
        out = np.empty(len(bits), np.int64)
        for kind in range(len(KINDS)):
            out[kind::2] = self.resident[kind].take(level[kind::2])
        return out

    def total(self, bits: NDArray[np.int32]) -> int:
        """Sum over all rows of M_i^{bits_i}: bytes of routed experts on the device, settled."""
        return int(self.by_row(bits).sum())
