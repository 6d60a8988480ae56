"""The kernels' block tables of all layers, in one buffer that never moves (DESIGN decision 5).

    planes int64 [rows, 8] | tables int64 [rows] | bits int32 [rows]        76 bytes a row

Changes are staged in a copy on the host and become true together by one ordered write of the whole
buffer (7,680 rows: 584 kB, some 12 us at 50 GB/s): a step sees all of them or none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedweight.core.geometry import MAX_BITS
from pagedweight.core.size_table import BlockIndex
from pagedweight.errors import Transient
from pagedweight.kernels.contract import BlockTable
from pagedweight.memory.interface import Device

_WORDS = MAX_BITS + 1
"""int64 words of a row beside its bits."""


@dataclass(frozen=True)
class Columns:
    """Views of one buffer: planes int64 [rows, 8], tables int64 [rows], bits int32 [rows]."""

    planes: NDArray[np.int64]
    tables: NDArray[np.int64]
    bits: NDArray[np.int32]

    @staticmethod
    def of(words: NDArray[np.int64], rows: int) -> Columns:
        return Columns(
            words[: rows * MAX_BITS].reshape(rows, MAX_BITS),
            words[rows * MAX_BITS : rows * _WORDS],
            words[rows * _WORDS :].view(np.int32)[:rows],
        )


class KernelTables:
    """`layers[l]` is layer l's `BlockTable`, a view of the buffer on `torch_device`."""

    def __init__(
        self, device: Device, index: BlockIndex, torch_device: torch.device | str = "cpu"
    ) -> None:
        rows, words = index.rows, index.rows * _WORDS + (index.rows + 1) // 2
        self._device = device
        self._buffer = torch.zeros(words, dtype=torch.int64, device=torch_device)
        self._written = np.zeros(words, np.int64)
        self._staged = np.zeros(words, np.int64)
        self.written = Columns.of(self._written, rows)
        self.staged = Columns.of(self._staged, rows)
        self.layers = self._views(index)

    def _views(self, index: BlockIndex) -> tuple[BlockTable, ...]:
        rows, shape = index.rows, index.shape
        planes = self._buffer[: rows * MAX_BITS].view(*shape, MAX_BITS)
        tables = self._buffer[rows * MAX_BITS : rows * _WORDS].view(*shape)
        bits = self._buffer[rows * _WORDS :].view(torch.int32)[:rows].view(*shape)
        return tuple(BlockTable(bits[n], planes[n], tables[n]) for n in range(index.layers))

    def commit(self) -> None:
        """In order: what is staged becomes true. Raises Transient; then nothing is staged."""
        try:
            self._device.write(self._buffer.data_ptr(), self._staged.view(np.uint8))
        except Transient:
            self._staged[:] = self._written
            raise
        self._written[:] = self._staged

    def on_device(self) -> Columns:
        """What the device holds, for checks; blocks until ordered work is done."""
        raw = self._device.read(self._buffer.data_ptr(), self._staged.nbytes)
        return Columns.of(raw.view(np.int64), len(self.written.tables))
