"""Why is one policy slower than another under the same load: its bits, prompts, or too few running?

    python -m pagedweight.bench.steps pressure_gpu_24.json KEEP --json steps.json

KEEP is the folder that `bench pressure --keep` filled. Between two lines of a timeline lie a few
steps; those with prompts are told from those that only decode by the tokens scheduled. Decoding is
compared at equal requests running and equal bits; of steps in which rows moved, or that took long
because the one before had prompts, the median takes no notice.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedweight.bench.record import read_record, write_record
from pagedweight.errors import UserError
from pagedweight.runtime.timeline import Timeline

RUNNING = (1, 4, 8, 12, 16, 24, 32, 48, 64, 96, 112, 128, 160, 192, 256)
PROMPTS = (257, 513, 1025, 1537, 2049, 4097)
"""Edges of the rows: requests running, and tokens of prompts in a step."""
LEAST, LEAST_PROMPTS = 5, 3
"""Stretches that a row rests on at least."""
ALONE, NEAR_RUNNING = 3, 4
"""Stretches without prompts on both sides; requests running more or less."""
SLACK, SPARE_TOKENS = 1.15, 3
"""Requests come and go within a stretch: so many tokens are still none of a prompt."""
SLOW_SECONDS = 0.03
"""A step that decodes and takes longer stood behind one with prompts; counted with those."""
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Stretches:
    """What lies between two lines of a timeline, arrays of one length.

    at: seconds from the first request to its end; seconds: its length; steps, scheduled (tokens),
    generated: in it; running: mean of both ends; bits: at its end; moved: rows changed bits in it.
    """

    at: Floats
    seconds: Floats
    steps: Floats
    scheduled: Floats
    generated: Floats
    running: Floats
    bits: Floats
    moved: Bools

    @staticmethod
    def of(timeline: Timeline) -> Stretches:
        """UserError when no request was ever there."""
        column = timeline.column
        asked = np.flatnonzero(column("running") + column("waiting") > 0)
        if not asked.size:
            raise UserError(f"{timeline.name}: no request in it")
        times, running = column("monotonic"), column("running")
        changed = column("rows_lowered") + column("rows_raised")
        return Stretches(
            (times - times[asked[0]])[1:],
            np.diff(times),
            np.diff(column("step")),
            np.diff(column("tokens_scheduled")),
            np.diff(column("tokens_generated")),
            (running[1:] + running[:-1]) / 2,
            column("bits")[1:],
            np.diff(changed) > 0,
        )

    @property
    def busy(self) -> Bools:
        found: Bools = (self.steps > 0) & (self.running > 0) & (self.at > 0)
        return found

    @property
    def decodes(self) -> Bools:
        """Where no step has prompts."""
        most = SLACK * self.running * self.steps + SPARE_TOKENS
        found: Bools = self.busy & (self.scheduled <= most)
        return found


def decode_rows(of: Stretches) -> list[dict[str, float]]:
    """Milliseconds of a step that only decodes, by bits (to a tenth) and requests running."""
    each = 1e3 * of.seconds / np.maximum(of.steps, 1)
    tenths, rows = np.round(of.bits, 1), []
    for bits in np.unique(tenths).tolist():
        for low, high in pairwise(RUNNING):
            here = of.decodes & ~of.moved & (tenths == bits)
            here &= (of.running >= low) & (of.running < high)
            if here.sum() >= LEAST:
                row = {
                    "bits": float(np.average(of.bits[here], weights=of.steps[here])),
                    "running": float(np.average(of.running[here], weights=of.steps[here])),
                    "steps": int(of.steps[here].sum()),
                    "ms_p50": float(np.median(each[here])),
                }
                rows.append({"from": low, "below": high, **_short(row)})
    return rows


def prompt_rows(of: Stretches) -> list[dict[str, float]]:
    """Milliseconds of a step with prompts, by their tokens, where no other such step is near: what
    the stretches around take beyond decoding with as many running. (With two steps in flight the
    time stands in a stretch before or after; a stretch may hold two such steps, as two prompts
    that come one after the other make.)"""
    each = 1e3 * of.seconds / np.maximum(of.steps, 1)
    found: list[tuple[float, float]] = []
    for at in range(ALONE, len(of.at) - ALONE):
        around = slice(at - ALONE, at + ALONE + 1)
        near = of.decodes & ~of.moved & (np.abs(of.running - of.running[at]) < NEAR_RUNNING)
        alone = of.busy[around].all() and int((~of.decodes[around]).sum()) == 1
        if of.decodes[at] or not alone or not near.any():
            continue
        others = (of.steps[around].sum() - 1) * float(np.median(each[near]))
        tokens = of.scheduled[at] - of.running[at] * of.steps[at]
        found.append((float(tokens), 1e3 * float(of.seconds[around].sum()) - others))
    rows, (tokens_of, ms) = [], np.array(found).reshape(-1, 2).T
    for low, high in pairwise(PROMPTS):
        here = (tokens_of >= low) & (tokens_of < high)
        if here.sum() >= LEAST_PROMPTS:
            spread = np.percentile(ms[here], [10, 50, 90])
            named = dict(zip(("ms_p10", "ms_p50", "ms_p90"), map(float, spread), strict=True))
            rows.append({"from": low, "below": high, "steps": int(here.sum()), **_short(named)})
    return rows


def share(of: Stretches, start: float, end: float) -> dict[str, float]:
    """Of the seconds from `start` to `end`: steps that only decode, and those with prompts."""
    inside = of.busy & (of.at >= start) & (of.at < end)
    quick = of.decodes & (of.seconds <= SLOW_SECONDS * of.steps)
    found: dict[str, float] = {}
    for name, here in (("decode", inside & quick), ("prompts", inside & ~quick)):
        found[f"{name}_steps"] = int(of.steps[here].sum())
        found[f"{name}_s"] = float(of.seconds[here].sum())
    found["decode_running"] = float(
        np.average(of.running[inside & quick], weights=of.steps[inside & quick])
    )
    generated = of.generated[inside].sum()
    prompts = of.scheduled[inside].sum() - generated
    return _short({**found, "generated": int(generated), "prompt_tokens": int(prompts)})


def _short(row: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in row.items()}


def peak_of(result: dict[str, Any], peak: str, row: dict[str, Any]) -> tuple[float, float]:
    """Seconds from the first request: when the phase `peak` begins, and when its last request was
    answered. Raises UserError."""
    begin = 0.0
    for phase in result["load"]["phases"]:
        if phase["name"] == peak:
            return begin, begin + row["peak_s"]
        begin += phase["seconds"]
    raise UserError(f"the load has no phase {peak}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what `bench.steps` finds, and write it with `--json`."""
    parser = argparse.ArgumentParser(prog="python -m pagedweight.bench.steps", description=__doc__)
    parser.add_argument("result", type=Path, help="what bench pressure has written")
    parser.add_argument("kept", type=Path, help="its --keep")
    parser.add_argument("--peak", default="burst", help="the phase whose seconds are divided")
    parser.add_argument("--json", type=Path, help="file to write")
    asked = parser.parse_args(arguments)
    result, rows = read_record(asked.result), []
    for row in result["rows"]:
        path = asked.kept / f"{row['policy']}-0.load.jsonl"
        if not path.exists():
            continue  # vLLM's own models have no timeline
        of = Stretches.of(Timeline.load(path))
        start, end = peak_of(result, asked.peak, row)
        found = {
            "policy": row["policy"],
            "peak": share(of, start, end),
            "decode": decode_rows(of),
            "prompts": prompt_rows(of),
        }
        rows.append(found)
        print(f"{row['policy']}: {json.dumps(found['peak'])}")
        for kind in ("decode", "prompts"):
            for line in found[kind]:
                print(f"   {kind:8}{json.dumps(line)}")
    if not rows:
        raise UserError(f"{asked.kept}: no timeline of a policy in {asked.result}")
    if asked.json:
        write_record(asked.json, {"of": asked.result.name, "rows": rows})


if __name__ == "__main__":
    main()
