"""A weight page table as plain arrays and as bytes, for the plan channel and for traces.

Bytes: the 4-byte magic, then little-endian uint32 format version, layers, experts, lowest level,
highest level, then int64 table version, plane bytes by kind and table bytes [kinds, levels], then
the columns in the order of `COLUMNS`. A reader refuses anything else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.geometry import KINDS
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.size_table import BlockIndex, SizeTable

MAGIC = b"PWPT"
FORMAT_VERSION = 1
HEADER = struct.Struct("<4s5Iq")
COLUMNS = (
    ("committed_bits", np.uint8),
    ("desired_bits", np.uint8),
    ("goal_bits", np.uint8),
    ("moving", np.uint8),
    ("epoch", np.int64),
    ("plane_states", np.uint8),
    ("table_states", np.uint8),
)
"""Columns and their types on the wire; int32 bits fit a byte."""


@dataclass(frozen=True, eq=False)
class TableSnapshot:
    """All that a `WeightPageTable` holds at its `version`; `columns` are copies."""

    index: BlockIndex
    sizes: SizeTable
    version: int
    columns: dict[str, NDArray[Any]]

    @staticmethod
    def of(table: WeightPageTable) -> TableSnapshot:
        columns = {name: getattr(table, name).astype(dtype) for name, dtype in COLUMNS}
        return TableSnapshot(table.index, table.sizes, table.version, columns)

    def restore(self) -> WeightPageTable:
        """A new table with these contents. Raises AssertionError when they are not sound."""
        table = WeightPageTable(self.index, self.sizes, self.sizes.lowest)
        for name, column in self.columns.items():
            own: NDArray[Any] = getattr(table, name)
            if own.shape != column.shape:
                raise AssertionError(f"snapshot: {name} is {column.shape}, not {own.shape}")
            own[...] = column
        table.version = self.version
        table.recount()
        table.check_integrity()
        return table

    def to_bytes(self) -> bytes:
        head = HEADER.pack(
            MAGIC,
            FORMAT_VERSION,
            self.index.layers,
            self.index.experts,
            self.sizes.lowest,
            self.sizes.planes,
            self.version,
        )
        sizes = [*self.sizes.plane_bytes, *self.sizes.table_bytes.ravel().tolist()]
        body = [self.columns[name].tobytes() for name, _ in COLUMNS]
        return b"".join([head, np.array(sizes, "<i8").tobytes(), *body])

    @staticmethod
    def from_bytes(data: bytes) -> TableSnapshot:
        """Inverse of `to_bytes`. Raises ValueError for another format, version or length."""
        if len(data) < HEADER.size or data[:4] != MAGIC:
            raise ValueError("not a snapshot of a weight page table")
        _, wire, layers, experts, low, high, version = HEADER.unpack_from(data)
        if wire != FORMAT_VERSION:
            raise ValueError(f"snapshot format {wire}, this program reads {FORMAT_VERSION}")
        levels, index = tuple(range(low, high + 1)), BlockIndex(layers, experts)
        shapes = {"plane_states": (index.rows, high), "table_states": (index.rows, len(levels))}
        size_count = len(KINDS) * (1 + len(levels))
        parts: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = [
            ("sizes", np.dtype("<i8"), (size_count,))
        ]
        parts += [(n, np.dtype(d), shapes.get(n, (index.rows,))) for n, d in COLUMNS]
        want = HEADER.size + sum(d.itemsize * int(np.prod(shape)) for _, d, shape in parts)
        if len(data) != want:
            raise ValueError(f"snapshot of {len(data)} bytes where its header means {want}")
        arrays: dict[str, NDArray[Any]] = {}
        at = HEADER.size
        for name, dtype, shape in parts:
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape)
            at += count * dtype.itemsize
        numbers = arrays.pop("sizes")
        sizes = SizeTable(
            levels=levels,
            plane_bytes=(int(numbers[0]), int(numbers[1])),
            table_bytes=numbers[2:].reshape(len(KINDS), len(levels)).astype(np.int64),
        )
        return TableSnapshot(index, sizes, version, arrays)
