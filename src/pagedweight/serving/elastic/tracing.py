"""`--trace FOLDER` and its counterpart, a run that follows a recorded bit trace.

    FOLDER/planner.jsonl   what the planner saw and answered: `core.trace.Trace` replays it
    FOLDER/bits.jsonl      which rows had which bits at which model step (a step with tokens)

Model steps count from 1; what changes between two of them counts for the later one, and step 0 has
the bits of the start. Served again under the same bit trace, the same requests get the same tokens.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.observation import Observation
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import Plan, Planner, PlanQueue, TableState
from pagedweight.core.trace import TraceRecorder
from pagedweight.errors import UserError
from pagedweight.runtime.messages import Stage, StepPlan, WorkerReport
from pagedweight.runtime.trace import BitTrace, BitTraceFile

PLANNER, BITS = "planner.jsonl", "bits.jsonl"


def trace_folder(path: str) -> Path:
    """The folder, made if need be. UserError when it cannot be."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--trace {folder} cannot be made: {error}") from error
    return folder


def check_trace(path: str | Path) -> None:
    """UserError when there can be no folder `path`; makes nothing."""
    folder = Path(path).absolute()
    nearest = next(part for part in (folder, *folder.parents) if part.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(
            f"--trace {path} cannot be made: {nearest} is no folder that can be written"
        )


class TracingPlanner:
    """A planner that writes down what it saw and what it answered."""

    def __init__(self, planner: Planner, folder: Path) -> None:
        self._planner = planner
        self._recorder = TraceRecorder(folder / PLANNER, planner.context, planner.queue)

    def step(self, table: WeightPageTable, observation: Observation) -> Plan:
        before = TableState.of(table)
        plan = self._planner.step(table, observation)
        self._recorder.record(before, observation, plan)
        return plan

    @property
    def queue(self) -> PlanQueue:
        return self._planner.queue

    def close(self) -> None:
        self._recorder.close()


class BitRecorder:
    """On a worker: notes the bits of every model step. `bits` [rows] are those of the start."""

    def __init__(self, folder: Path, bits: NDArray[np.int32]) -> None:
        self._file = BitTraceFile(folder / BITS)
        self._last = np.zeros_like(bits)
        self._step = 0
        self._note(bits)

    def model_step(self, bits: NDArray[np.int32]) -> None:
        """A step with tokens begins and reads the experts at `bits`."""
        self._step += 1
        self._note(bits)

    def _note(self, bits: NDArray[np.int32]) -> None:
        self._file.record(self._step, self._last, bits)
        self._last = bits.copy()

    def close(self) -> None:
        self._file.close()


class Replay:
    """On the scheduler: the plans of a bit trace, each whole on entry to its model step."""

    def __init__(self, trace: BitTrace, bits: NDArray[np.int32]) -> None:
        self._trace = trace
        self._bits = bits.copy()
        self._planned = -1

    def plan(self, model_step: int) -> StepPlan | None:
        """What must change before `model_step` runs; None when it is planned already."""
        if self._planned >= model_step:
            return None
        before = self._bits.copy()
        for number in range(self._planned + 1, model_step + 1):
            rows, bits = self._trace.changes.get(number, ((), ()))
            self._bits[list(rows)] = bits
        self._planned = model_step
        now = BitTrace()
        now.record(model_step, before, self._bits)
        return now.plan(model_step, before)

    def check(self, report: WorkerReport) -> None:
        """UserError when a rank could not follow: from there on it would be another run."""
        failed = [status for status in report.batches if status.stage is Stage.FAILED]
        if failed:
            raise UserError(
                f"the replay left its trace at step {report.step} ({failed[0].reason}): "
                f"give it more --memory"
            )
