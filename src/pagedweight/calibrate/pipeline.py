"""Measure a text, fit residual heads, and put both into a finished checkpoint."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagedweight.calibrate.experts import Weights
from pagedweight.calibrate.heads import HeadFit, fit_heads
from pagedweight.calibrate.levels import LevelErrors
from pagedweight.calibrate.measure import Measured, MeasureOptions, Report, measure
from pagedweight.calibrate.text import CalibrationTokens
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.recalibrate import replace_calibration
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.errors import UserError, listing
from pagedweight.kernels.device import device_of

_CPU = torch.device("cpu")
LIKENESS = 0.5
"""Share of a block's squared weights by which its highest level may be off. Codes of the same
weights lie far below (0.12 at 2 bits); those of other weights come to 2."""


@dataclass(frozen=True, eq=False)
class Calibrated:
    """What one run found. seconds: by stage, wall time; cpu_seconds: of all threads together;
    peak_bytes: of the process, host memory."""

    measured: Measured
    heads: HeadFit
    metadata: dict[str, str]
    seconds: dict[str, float]
    cpu_seconds: float
    peak_bytes: int


def calibrate_checkpoint(
    checkpoint: Checkpoint,
    source: SourceCheckpoint,
    text: CalibrationTokens,
    options: MeasureOptions,
    report: Report,
) -> Calibrated:
    """Measure and write; codes and tables are not touched. The checkpoint changes at the very end.

    Raises UserError when the device is not there or `source` is not what was quantized.
    """
    check_source(checkpoint, source, device_of(options.device))
    watch, busy = _Stopwatch(report), time.process_time()
    measured = measure(source, checkpoint, text.tokens, options, checkpoint.path, watch.report)
    watch.begin("heads")
    heads = fit_heads(measured.measurements, options.seed)
    metadata = {
        **text.metadata,
        "sensitivity": options.method,
        "labels": options.labels,
        **_codes(checkpoint.calibration().metadata),
    }
    arrays: dict[str, np.ndarray[Any, Any]] = {**measured.arrays, **heads.heads.to_arrays()}
    replace_calibration(checkpoint, arrays, metadata)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds, busy = watch.end(), time.process_time() - busy
    return Calibrated(measured, heads, metadata, seconds, busy, peak)


def check_source(
    checkpoint: Checkpoint, source: SourceCheckpoint, device: torch.device = _CPU
) -> None:
    """Raise UserError unless the checkpoint was made from these weights: first its shape, then the
    first expert's down of every layer at the highest level, on `device`."""
    mine, theirs = (
        {
            "experts": one.shape.experts,
            "hidden size": one.shape.hidden,
            "expert width": one.shape.intermediate,
            "MoE layers": list(one.moe_layers),
            "activation": one.activation,
            "experts per token": one.top_k,
        }
        for one in (checkpoint, source)
    )
    wrong = [f"{key} {mine[key]} and {theirs[key]}" for key in mine if mine[key] != theirs[key]]
    if wrong:
        raise UserError(f"{checkpoint.path} was not made from {source.path}: {listing(wrong)}")
    for position in range(len(checkpoint.moe_layers)):
        weights: Weights = {(0, "down"): source.expert(position, 0, "down").to(device)}
        errors = LevelErrors(checkpoint, position, weights)
        for (expert, kind), weight in weights.items():
            error = errors(expert, kind, checkpoint.bits[-1:])
            share = float(error.square().sum() / weight.float().square().sum())
            if share > LIKENESS:
                raise UserError(
                    f"{checkpoint.path} was not made from {source.path}: at "
                    f"{checkpoint.bits[-1]} bits, layer {checkpoint.moe_layers[position]} expert "
                    f"{expert} {kind} is off by {share:.0%} of the weights' squares; give the "
                    f"model that was quantized"
                )


def _codes(metadata: Mapping[str, str]) -> dict[str, str]:
    """How the codes were made and what they were fitted to: kept over later calibrations."""
    kept = {"codes_text": metadata.get("codes_text", metadata["text"])}
    return kept | {key: metadata[key] for key in ("codes",) if key in metadata}


class _Stopwatch:
    """Seconds of every stage, while progress goes through."""

    def __init__(self, through: Report) -> None:
        self._through = through
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()
        self._stage = ""
        self.begin("load")

    def begin(self, stage: str) -> None:
        now = time.perf_counter()
        if self._stage:
            self._seconds[self._stage] = now - self._since
        self._stage, self._since = stage, now

    def report(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.begin(stage)
        self._through(stage, done, total)

    def end(self) -> dict[str, float]:
        self.begin("")
        return self._seconds


def coverage(tokens: np.ndarray[Any, Any], moe_layers: Sequence[int]) -> dict[str, Any]:
    """How much of the routed experts the text reached."""
    share = tokens / np.maximum(tokens.sum(axis=1, keepdims=True), 1)
    unseen = [[moe_layers[pos], int(expert)] for pos, expert in np.argwhere(tokens == 0)]
    return {
        "experts": int(tokens.size),
        "seen": int((tokens > 0).sum()),
        "unseen": unseen,
        "idlest_share": float(share.min()),
        "fewest_tokens": int(tokens.min()),
    }
