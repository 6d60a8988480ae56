"""The activations of all calibration tokens between two layers: in memory, or in a file."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch

IN_MEMORY_BYTES = 2 << 30
"""Buffers that are larger together are files: pages that are not in use can leave memory."""


class ActivationBuffer:
    """float32 [sequences, T, H]; one sequence is read or written at a time.

    `together`: buffers of this size that are alive at once.
    """

    def __init__(self, size: tuple[int, int, int], scratch: Path, together: int = 1) -> None:
        elements = math.prod(size)
        if together * elements * 4 <= IN_MEMORY_BYTES:
            self._data = torch.empty(size, dtype=torch.float32)
            return
        # Unlinked while open: it goes with the process, however that ends.
        self._file = tempfile.NamedTemporaryFile(dir=scratch, prefix=".activations-")  # noqa: SIM115
        self._file.truncate(elements * 4)
        flat = torch.from_file(self._file.name, shared=True, size=elements, dtype=torch.float32)
        self._data = flat.reshape(size)
        self._file.close()

    def __len__(self) -> int:
        return len(self._data)

    def read(self, sequence: int) -> torch.Tensor:
        """[T, H] as the last layer left it."""
        return self._data[sequence]

    def write(self, sequence: int, hidden: torch.Tensor) -> None:
        self._data[sequence].copy_(hidden)
