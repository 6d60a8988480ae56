"""The timeline: what an operator sees of a service over time, one JSON object a line.

The first line is the header: what was served and how its memory was divided. Every other line is a
`Sample`, the state at one scheduler step; it holds until the next line. Counts without a unit in
their name are totals since the start, so a line may be missing without harm. A line cut short by a
crash is left out, and said so. Written by the scheduler's process, read by `top`, `plot` and
benchmarks, which need neither torch nor vLLM. docs/operating.md says it for users.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from pagedweight.errors import UserError

FORMAT = "pagedweight-timeline"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class BudgetSplit:
    """How a rank's memory is divided, in bytes.

    total:            `--memory` in whole pages of `page` bytes.
    reserve:          kept for lowering: neither KV nor reloads take it.
    weights_at_start: routed experts at the bits of the start; kv_at_start: KV backed then.
    weights_at_floor: experts with all rows at their lowest bits; kv_reachable: KV backed then.
    """

    total: int
    page: int
    reserve: int
    weights_at_start: int
    weights_at_floor: int
    kv_at_start: int
    kv_reachable: int


@dataclass(frozen=True)
class Header:
    """What does not change while a service runs.

    started:          wall-clock time, seconds since the epoch.
    precision:        "elastic", or "static" when bits stay as they are.
    levels:           stored bits, ascending.
    block_tokens, block_bytes: of a KV block over all layers of one rank.
    granule_blocks:   KV grows and shrinks by this many blocks.
    usable_at_start, reachable: KV blocks, without the null block.
    offload_blocks, reload_blocks, dwell_steps: the policy's thresholds.
    """

    started: float
    version: str
    model: str
    precision: str
    levels: tuple[int, ...]
    ranks: int
    engine: int
    budget: BudgetSplit
    block_tokens: int
    block_bytes: int
    granule_blocks: int
    usable_at_start: int
    reachable: int
    offload_blocks: int
    reload_blocks: int
    dwell_steps: int

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}

    @staticmethod
    def from_json(line: dict[str, Any], name: str) -> Header:
        """Inverse of `to_json`; `name` goes into messages. Raises UserError."""
        if line.get("format") != FORMAT:
            raise UserError(f'{name} is not a timeline: its first line lacks "format": "{FORMAT}"')
        if line.get("format_version") != FORMAT_VERSION:
            raise UserError(
                f"timeline {name} has version {line.get('format_version')}, this program reads "
                f"{FORMAT_VERSION}"
            )
        try:
            parts = {"budget": BudgetSplit(**line["budget"]), "levels": tuple(line["levels"])}
            return Header(**{f.name: parts.get(f.name, line[f.name]) for f in fields(Header)})
        except (KeyError, TypeError) as fault:
            raise UserError(f"timeline {name}: the header is damaged: {fault!r}") from None


@dataclass(frozen=True)
class Sample:
    """One line. Bytes are of one rank, blocks are KV blocks without the null block.

    At step `step`, before it is scheduled:
    time, monotonic:  seconds since the epoch, and of a clock that is never set.
    running, waiting: requests.
    kv_demanded:      used, and what waiting requests that may start need for their prompts.
    kv_used:          held by requests. kv_usable: backed by memory. kv_reachable: at all floors.

    After it was planned:
    bits, bits_gate_up, bits_down: mean committed bits by weight.
    device_bytes, transfer_bytes: experts on the device; pages that come or go.
    kv_bytes:         backed KV. free_bytes: pages that neither has, the reserve not counted.
    target_bytes:     D of eq. 7, 0 without pressure.
    plan:             "none", "offload" or "reload"; stage: the floor stage it was made under.
    plan_damage:      predicted damage of this plan (eq. 8), negative when it restores.
    damage:           predicted damage of all committed bits against every stored bit (eq. 8).
    rows_waiting:     rows whose bits are not the desired ones; batches: transitions under way.

    Totals since the start:
    preemptions; tokens_scheduled, tokens_generated; rows_lowered, rows_raised; copied_bytes from
    the host; compacted_bytes within the device; floor_hits: steps under pressure at which the
    floors left less than D to give; damage_taken: of all offload plans; rollbacks: transitions that
    a refusal undid.
    """

    time: float
    monotonic: float
    step: int
    running: int
    waiting: int
    kv_demanded: int
    kv_used: int
    kv_usable: int
    kv_reachable: int
    bits: float
    bits_gate_up: float
    bits_down: float
    device_bytes: int
    transfer_bytes: int
    kv_bytes: int
    free_bytes: int
    target_bytes: int
    plan: str
    stage: str
    plan_damage: float
    damage: float
    rows_waiting: int
    batches: int
    preemptions: int
    tokens_scheduled: int
    tokens_generated: int
    rows_lowered: int
    rows_raised: int
    copied_bytes: int
    compacted_bytes: int
    floor_hits: int
    damage_taken: float
    rollbacks: int


SAMPLE_FIELDS = tuple(field.name for field in fields(Sample))
_DIGITS = {"time": 3, "monotonic": 4, "bits": 4, "bits_gate_up": 4, "bits_down": 4}


def _json_of(sample: Sample) -> str:
    line = {name: getattr(sample, name) for name in SAMPLE_FIELDS}
    for name, digits in _DIGITS.items():
        line[name] = round(line[name], digits)
    for name in ("plan_damage", "damage", "damage_taken"):
        line[name] = float(f"{line[name]:.6g}")
    return json.dumps(line, separators=(",", ":"))


class TimelineWriter:
    """Writes a timeline while a service runs. Lines are buffered until `flush` or `close`."""

    def __init__(self, path: str | Path, header: Header) -> None:
        """Start the file anew. Raises UserError when it cannot be written."""
        self.path = Path(path)
        check_writable(path)
        self._file: IO[str] = self.path.open("w", encoding="utf-8")
        self._file.write(json.dumps(header.to_json(), separators=(",", ":")) + "\n")
        self._file.flush()

    def write(self, sample: Sample) -> None:
        """Add a line. Raises OSError (a full disk), then or at the next flush."""
        self._file.write(_json_of(sample) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def check_writable(path: str | Path) -> None:
    """Raises UserError when a timeline cannot be written at `path`; writes nothing."""
    target = Path(path).resolve()
    if target.is_dir():
        raise UserError(f"--timeline {path} is a folder: name a file in it")
    if not target.parent.is_dir():
        raise UserError(f"--timeline {path}: there is no folder {target.parent}")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UserError(f"--timeline {path} may not be written")


class LineReader:
    """Reads a timeline that may still grow. `cut`: text behind the last whole line so far."""

    def __init__(self, path: str | Path) -> None:
        """Read the header. Raises UserError without one, or with one of another version."""
        self.name = str(path)
        try:
            self._file = Path(path).open(encoding="utf-8", errors="replace")  # noqa: SIM115
        except OSError as fault:
            raise UserError(f"cannot read timeline {path}: {fault.strerror}") from None
        self.cut = ""
        self._number = 0
        try:
            first = next(self._lines(), None)
        except UserError:
            first = None
        if not isinstance(first, dict):
            raise UserError(f"{path} is not a timeline: it has no header line")
        self.header = Header.from_json(first, self.name)

    def more(self) -> Iterator[Sample]:
        """Samples written since the last call."""
        for line in self._lines():
            try:
                yield Sample(**{name: line[name] for name in SAMPLE_FIELDS})
            except (KeyError, TypeError) as fault:
                raise self._fault(f"{fault!r} is missing") from None

    def _lines(self) -> Iterator[Any]:
        while line := self._file.readline():
            self.cut += line
            if not line.endswith("\n"):
                return
            whole, self.cut = self.cut, ""
            self._number += 1
            try:
                value = json.loads(whole)
            except ValueError as fault:
                raise self._fault(str(fault)) from None
            yield value

    def _fault(self, what: str) -> UserError:
        return UserError(f"timeline {self.name}, line {self._number}, is damaged: {what}")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Timeline:
    """A timeline read whole. `truncated`: the last line was cut short and is left out."""

    name: str
    header: Header
    samples: tuple[Sample, ...]
    truncated: bool

    @staticmethod
    def load(path: str | Path) -> Timeline:
        """Raises UserError when the file is missing, damaged or of another version."""
        reader = LineReader(path)
        try:
            samples = tuple(reader.more())
            return Timeline(str(path), reader.header, samples, truncated=bool(reader.cut))
        finally:
            reader.close()

    def column(self, name: str) -> NDArray[np.float64]:
        """One field of every sample (not `plan` or `stage`), float64 [samples]."""
        return np.array([getattr(sample, name) for sample in self.samples], np.float64)
