"""A bit trace: which row was committed to how many bits at which step, for replaying a service.

Serving a prompt again under the same bit trace gives the same tokens, whatever the load was.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedweight.core.page_table import BitsArray
from pagedweight.core.size_table import IntArray
from pagedweight.errors import UserError

FORMAT_VERSION = 1
NAMES = ("initial", "steps", "rows", "bits")


@dataclass(frozen=True, eq=False)
class BitTrace:
    """Commits in the order of their steps.

    initial: uint8 [rows], bits before the first commit.
    steps:   int64 [n], ascending; rows: int32 [n]; bits: uint8 [n].
    """

    initial: NDArray[np.uint8]
    steps: IntArray
    rows: NDArray[np.int32]
    bits: NDArray[np.uint8]

    def changes(self, step: int) -> tuple[IntArray, BitsArray]:
        """Rows that are committed at exactly `step`, and their bits, in order."""
        first, last = np.searchsorted(self.steps, [step, step + 1])
        return self.rows[first:last].astype(np.int64), self.bits[first:last].astype(np.int32)

    def at(self, step: int) -> BitsArray:
        """q of every row after the commits of `step`, int32 [rows]."""
        out = self.initial.astype(np.int32)
        last = int(np.searchsorted(self.steps, step, side="right"))
        for row, bits in zip(self.rows[:last].tolist(), self.bits[:last].tolist(), strict=True):
            out[row] = bits
        return out

    def save(self, path: str | Path) -> None:
        """Write a compressed npz: temporary name, then renamed."""
        target = Path(path)
        temporary = target.with_name(target.name + ".tmp")
        with temporary.open("wb") as file:
            arrays = {name: getattr(self, name) for name in NAMES}
            np.savez_compressed(file, version=np.int64(FORMAT_VERSION), **arrays)
        os.replace(temporary, target)

    @staticmethod
    def load(path: str | Path) -> BitTrace:
        """Read a saved trace. Raises UserError: missing, not a bit trace, another version."""
        try:
            with np.load(path, allow_pickle=False) as data:
                if int(data["version"]) != FORMAT_VERSION:
                    raise UserError(
                        f"bit trace {path} has version {int(data['version'])}, "
                        f"this program reads {FORMAT_VERSION}"
                    )
                return BitTrace(**{name: data[name] for name in NAMES})
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as fault:
            raise UserError(f"cannot read bit trace {path}: {fault}") from None


class BitTraceRecorder:
    """Collects commits of a running service. Steps must not go back."""

    def __init__(self, initial: ArrayLike) -> None:
        self._initial = np.asarray(initial, np.uint8).copy()
        self._parts: list[tuple[int, NDArray[np.int32], NDArray[np.uint8]]] = []

    def record(self, step: int, rows: ArrayLike, bits: ArrayLike) -> None:
        """Rows that were committed to `bits` at `step`."""
        if self._parts and step < self._parts[-1][0]:
            raise ValueError(f"step {step} after step {self._parts[-1][0]}")
        picked = np.atleast_1d(np.asarray(rows, np.int32)).copy()
        values = np.array(np.broadcast_to(bits, picked.shape), np.uint8)
        if picked.size:
            self._parts.append((step, picked, values))

    def trace(self) -> BitTrace:
        """Everything recorded so far."""
        steps = [np.full(len(rows), step, np.int64) for step, rows, _ in self._parts]
        return BitTrace(
            initial=self._initial,
            steps=np.concatenate([np.empty(0, np.int64), *steps]),
            rows=np.concatenate([np.empty(0, np.int32), *(p[1] for p in self._parts)]),
            bits=np.concatenate([np.empty(0, np.uint8), *(p[2] for p in self._parts)]),
        )
