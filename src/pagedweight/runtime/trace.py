"""A bit trace: which rows changed to which bits on entry to which step, to be played again.

One JSON object a line, `{"step": 7, "rows": [3, 8], "bits": [4, 2]}`, steps rising. Played again,
every change happens whole on entry to its step, with nothing under way in between: the serial
schedule that an asynchronous run must agree with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagedweight.errors import UserError
from pagedweight.runtime.messages import Batch, StepPlan

Changes = tuple[tuple[int, ...], tuple[int, ...]]
"""(rows, bits)."""


def _line(step: int, rows: NDArray[np.int64], bits: NDArray[np.int32]) -> str:
    return json.dumps({"step": step, "rows": rows.tolist(), "bits": bits.tolist()}) + "\n"


class BitTraceFile:
    """A trace that is written while it happens, a line at a time."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("w", buffering=1)  # noqa: SIM115 until close

    def record(self, step: int, before: NDArray[np.int32], after: NDArray[np.int32]) -> None:
        """Note what differs between the bits before and after entry to `step`."""
        rows = np.flatnonzero(before != after)
        if rows.size:
            self._file.write(_line(step, rows, after[rows]))

    def close(self) -> None:
        self._file.close()


class BitTrace:
    """Changes of committed bits by step number."""

    def __init__(self, changes: dict[int, Changes] | None = None) -> None:
        self.changes: dict[int, Changes] = {} if changes is None else changes

    def record(self, step: int, before: NDArray[np.int32], after: NDArray[np.int32]) -> None:
        """Note what differs between the committed bits before and after entry to `step`."""
        rows = np.flatnonzero(before != after)
        if rows.size:
            self.changes[step] = (tuple(rows.tolist()), tuple(after[rows].tolist()))

    def plan(self, step: int, bits: NDArray[np.int32]) -> StepPlan:
        """The plan that repeats `step` on a rank whose committed bits are `bits`."""
        rows, goals = self.changes.get(step, ((), ()))
        batches = []
        for number, lowers in ((2 * step, True), (2 * step + 1, False)):
            pairs = [(r, b) for r, b in zip(rows, goals, strict=True) if (b < bits[r]) == lowers]
            if pairs:
                batches.append(
                    Batch(number, lowers, tuple(r for r, _ in pairs), tuple(b for _, b in pairs))
                )
        commit = tuple(batch.number for batch in batches)
        return StepPlan(step, commit=commit, prepare=tuple(batches), oldest=2 * step)

    def save(self, path: str | Path) -> None:
        lines = [
            json.dumps({"step": step, "rows": rows, "bits": bits}) + "\n"
            for step, (rows, bits) in sorted(self.changes.items())
        ]
        Path(path).write_text("".join(lines))

    @staticmethod
    def load(path: str | Path) -> BitTrace:
        """Read a trace. UserError when it cannot be, with the line's number when it is no trace."""
        try:
            with Path(path).open(encoding="utf-8") as lines:
                return BitTrace.of_lines(lines, str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read bit trace {path}: {error}") from None

    @staticmethod
    def of_lines(lines: Iterable[str], name: str) -> BitTrace:
        trace = BitTrace()
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                rows, bits = (tuple(int(v) for v in entry[key]) for key in ("rows", "bits"))
                step = int(entry["step"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{name} line {number} is not a line of a bit trace") from error
            if len(rows) != len(bits) or step in trace.changes:
                raise UserError(
                    f"{name} line {number}: step {step} is there twice, or {len(rows)} rows with "
                    f"{len(bits)} bits"
                )
            trace.changes[step] = (rows, bits)
        return trace
