"""A planner trace: every observation and plan of a service, replayed later to the same plans.

One JSON object a line. The first is the header: format, sizes, policy, calibration. Then, in the
order of time, `signals` lines (only when the signals changed) and `step` lines. Arrays are
`{"dtype", "shape", "data"}` with base64 of zlib of their little-endian bytes. A line cut short by
a crash is left out, and said so.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.calibration import Calibration
from pagedweight.core.observation import BatchSignals, KVPressure, Observation
from pagedweight.core.planner import Plan, PlanContext, PlanQueue, TableState, plan_step
from pagedweight.core.policy_file import policy_from_json, policy_to_json
from pagedweight.core.size_class import SlotCounts
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.errors import UserError

FORMAT = "pagedweight-trace"
FORMAT_VERSION = 1
SIGNALS = ("mass", "rho", "confidence", "clip")


def _encode(array: NDArray[Any]) -> dict[str, Any]:
    little = array.astype(array.dtype.newbyteorder("<"))
    data = base64.b64encode(zlib.compress(little.tobytes(), 6)).decode("ascii")
    return {"dtype": little.dtype.str, "shape": list(array.shape), "data": data}


def _decode(value: dict[str, Any]) -> NDArray[Any]:
    raw = zlib.decompress(base64.b64decode(value["data"]))
    stored = np.frombuffer(raw, np.dtype(value["dtype"])).reshape(value["shape"])
    return stored.astype(stored.dtype.newbyteorder("="))


class TraceRecorder:
    """Writes a trace while a service runs; a context manager."""

    def __init__(self, path: str | Path, context: PlanContext, queue: PlanQueue) -> None:
        """Start a file. `queue` is the planner's before the first recorded step."""
        self._file: IO[str] = Path(path).open("w", encoding="ascii")  # noqa: SIM115 until close
        self._signals: BatchSignals | None = None
        self._desired: NDArray[np.int32] | None = None
        self._write(_header(context, queue))

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def record(self, table: TableState, observation: Observation, plan: Plan) -> None:
        """One step: what `plan_step` was given and what it returned."""
        signals = observation.signals
        if signals is not None and signals is not self._signals:
            self._signals = signals
            parts = {name: getattr(signals, name) for name in SIGNALS}
            self._write({"signals": {n: _encode(a) for n, a in parts.items() if a is not None}})
        line: dict[str, Any] = {
            "step": observation.step,
            "kv": asdict(observation.kv),
            "signalled": signals is not None,
            "slots": [table.slots.planes.tolist(), table.slots.tables.tolist()],
        }
        if self._desired is None or not np.array_equal(self._desired, table.desired_bits):
            line["desired"] = _encode(table.desired_bits.astype(np.int8))
        if plan.kind != "none":
            line["rows"] = _encode(plan.rows.astype(np.int32))
            line["bits"] = _encode(plan.to_bits.astype(np.int8))
        self._write(line)
        self._desired = table.desired_bits.copy()
        self._desired[plan.rows] = plan.to_bits

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _header(context: PlanContext, queue: PlanQueue) -> dict[str, Any]:
    sizes = context.sizes
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "layers": context.index.layers,
        "experts": context.index.experts,
        "levels": list(sizes.levels),
        "plane_bytes": list(sizes.plane_bytes),
        "table_bytes": sizes.table_bytes.tolist(),
        "page_bytes": context.pages.page_bytes,
        "resting_bits": _encode(context.resting_bits.astype(np.int8)),
        "policy": json.loads(policy_to_json(context.policy)),
        "calibration": {n: _encode(a) for n, a in context.calibration.to_arrays().items()},
        "last_pressure_step": queue.last_pressure_step,
        "exchange_bytes": queue.exchange_bytes,
    }


@dataclass(frozen=True, eq=False)
class TraceStep:
    """One recorded step. rows: int64 [n], to_bits: int32 [n] of the plan; empty for none."""

    table: TableState
    observation: Observation
    rows: NDArray[np.int64]
    to_bits: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace read back. `truncated`: the last line was cut short and is left out."""

    context: PlanContext
    queue: PlanQueue
    steps: tuple[TraceStep, ...]
    truncated: bool

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace. Raises UserError when it is missing, damaged or of another version."""
        try:
            text = Path(path).read_text(encoding="ascii")
            lines = text.split("\n")
            head = json.loads(lines[0])
            if not isinstance(head, dict) or head.get("format") != FORMAT:
                raise UserError(f"{path} is not a planner trace")
            if head["format_version"] != FORMAT_VERSION:
                raise UserError(
                    f"planner trace {path} has version {head['format_version']}, "
                    f"this program reads {FORMAT_VERSION}"
                )
            context, queue = _context(head)
            steps = tuple(_steps([json.loads(line) for line in lines[1:-1]]))
        except (OSError, ValueError, KeyError, zlib.error) as fault:
            raise UserError(f"cannot read planner trace {path}: {fault!r}") from None
        return Trace(context, queue, steps, truncated=lines[-1] != "")

    def replay(self) -> Iterator[tuple[TraceStep, Plan]]:
        """Plan every recorded step again: (what was recorded, what is planned now)."""
        queue = self.queue
        for step in self.steps:
            queue, plan = plan_step(step.table, step.observation, self.context, queue)
            yield step, plan

    def differences(self) -> list[int]:
        """Scheduler steps at which the plan made now is not the recorded one; best empty."""
        return [
            step.observation.step
            for step, plan in self.replay()
            if not (
                np.array_equal(step.rows, plan.rows) and np.array_equal(step.to_bits, plan.to_bits)
            )
        ]


def _context(head: dict[str, Any]) -> tuple[PlanContext, PlanQueue]:
    levels = tuple(head["levels"])
    gate_up, down = head["plane_bytes"]
    calibration = {name: _decode(value) for name, value in head["calibration"].items()}
    context = PlanContext.of(
        BlockIndex(head["layers"], head["experts"]),
        SizeTable(levels, (gate_up, down), np.array(head["table_bytes"], np.int64)),
        Calibration.from_arrays(calibration, levels),
        policy_from_json(json.dumps(head["policy"])),
        head["page_bytes"],
        _decode(head["resting_bits"]).astype(np.int32),
    )
    return context, PlanQueue(
        last_pressure_step=head["last_pressure_step"],
        exchange_bytes=head.get("exchange_bytes", 0),
    )


def _steps(lines: list[dict[str, Any]]) -> Iterator[TraceStep]:
    signals: BatchSignals | None = None
    desired = np.empty(0, np.int32)
    for line in lines:
        if "signals" in line:
            signals = BatchSignals(**{n: _decode(a) for n, a in line["signals"].items()})
            continue
        if "desired" in line:
            desired = _decode(line["desired"]).astype(np.int32)
        planes, tables = line["slots"]
        slots = SlotCounts(np.array(planes, np.int64), np.array(tables, np.int64))
        seen = signals if line["signalled"] else None
        rows, bits = np.empty(0, np.int64), np.empty(0, np.int32)
        if "rows" in line:
            rows = _decode(line["rows"]).astype(np.int64)
            bits = _decode(line["bits"]).astype(np.int32)
        observation = Observation(line["step"], KVPressure(**line["kv"]), seen)
        yield TraceStep(TableState(desired, slots), observation, rows, bits)
        desired = desired.copy()
        desired[rows] = bits
