"""How long do quantize and calibrate take for a model's real shape, and in how much memory?

Makes a bfloat16 source of the first N layers with random weights, runs what the commands run, and
from N layers works out the whole model: layers, checks and copies grow with the model, the rest
stays. Rows of other models that FILE has stay.

    pagedweight bench offline qwen1.5-moe --layers 2 --folder /dev/shm/offline -o FILE
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedweight.bench.arguments import positive
from pagedweight.bench.models import MODELS, model_config
from pagedweight.bench.record import machine, read_record, write_record
from pagedweight.bench.source import make_source
from pagedweight.bench.synthetic import plain_shards
from pagedweight.calibrate.measure import MeasureOptions
from pagedweight.calibrate.pipeline import Calibrated, calibrate_checkpoint
from pagedweight.calibrate.text import CalibrationTokens
from pagedweight.checkpoint.names import architecture_of
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.result_file import check_target
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.errors import UserError
from pagedweight.kernels.device import device_of
from pagedweight.quantize.pipeline import Codes, QuantizeOptions, quantize_checkpoint

QUESTION = (
    "wall seconds and peak memory of quantize and calibrate on a source of a model's real shape, "
    "random weights; `measured` for the layers that were there, `whole_model` worked out from them"
)


@dataclass(frozen=True)
class Growth:
    """How much larger than the measured part the whole model is: layers, all bytes, and bytes that
    are only copied."""

    layers: float
    total: float
    plain: float


def random_tokens(vocabulary: int, sequences: int, length: int, seed: int) -> CalibrationTokens:
    """Token numbers of a text without meaning: the n-th most frequent about 1/n as often."""
    gen = torch.Generator().manual_seed(seed)
    drawn = torch.rand((sequences, length), generator=gen, dtype=torch.float64)
    tokens = (vocabulary**drawn).long().clamp_(max=vocabulary) - 1
    said = {"text": "none: random tokens", "sequences": str(sequences)}
    said |= {"sequence_length": str(length), "seed": str(seed)}
    return CalibrationTokens(tokens, said)


class Stages:
    """Wall seconds of each stage of a run that reports them; from the first report of one to that
    of the next."""

    def __init__(self, first: str) -> None:
        self.seconds: dict[str, float] = {}
        self._stage, self._since = first, time.perf_counter()

    def report(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self.close()
            self._stage = stage

    def close(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._since = now


def measure(
    config: Mapping[str, Any],
    whole: Mapping[str, Any],
    folder: Path,
    text: CalibrationTokens,
    device: str,
    codes: Codes,
) -> Iterator[dict[str, Any]]:
    """One row, first with quantize alone, then whole: a source of `config` below `folder` (removed
    afterwards), `whole` the full model's config.json."""
    source = _timed(lambda: make_source(config, folder / "source", device, 0), "source")
    measured: dict[str, dict[str, Any]] = {}
    try:
        measured["quantize"] = _quantize(source, folder / "out", text, device, codes)
        yield _row(source, whole, text, device, codes, measured)
        measured["calibrate"] = _calibrate(folder / "out", source, text, device)
        yield _row(source, whole, text, device, codes, measured)
    finally:
        for part in ("source", "out"):
            shutil.rmtree(folder / part, ignore_errors=True)


def _row(
    source: SourceCheckpoint,
    whole: Mapping[str, Any],
    text: CalibrationTokens,
    device: str,
    codes: Codes,
    measured: Mapping[str, dict[str, Any]],
) -> dict[str, Any]:
    growth = _growth(source, whole)
    full = {name: _grown(found["seconds"], growth) for name, found in measured.items()}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "codes": codes,
        "sequences": len(text.tokens),
        "sequence_length": text.tokens.shape[1],
        "moe_layers_measured": len(source.moe_layers),
        "moe_layers_of_model": len(architecture_of(whole).facts(whole).moe_layers),
        "measured": dict(measured),
        "whole_model": {
            **{f"{name}_s": round(seconds, 1) for name, seconds in full.items()},
            "sum_s": round(sum(full.values()), 1),
        },
    }


def _timed(work: Callable[[], SourceCheckpoint], name: str) -> SourceCheckpoint:
    start = time.perf_counter()
    found = work()
    print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    return found


def _quantize(
    source: SourceCheckpoint, out: Path, text: CalibrationTokens, device: str, codes: Codes
) -> dict[str, Any]:
    options = QuantizeOptions(calibration=text, device=device, codes=codes)
    _reset(device)
    stages = Stages("open")
    found = quantize_checkpoint(source, out, options, stages.report)
    stages.close()
    layers = len(source.moe_layers)
    return {
        **_measured(stages.seconds, device),
        "layer_s": round(stages.seconds["layers"] / layers, 2),
        "blocks": int(found.tokens.size * 2),
        "blocks_kept_plain": None if found.plain_kept is None else int(found.plain_kept.sum()),
    }


def _calibrate(
    out: Path, source: SourceCheckpoint, text: CalibrationTokens, device: str
) -> dict[str, Any]:
    _reset(device)
    found: Calibrated = calibrate_checkpoint(
        Checkpoint.open(out), source, text, MeasureOptions(device=device), lambda *_: None
    )
    both = found.seconds["forward"] + found.seconds["backward"]
    return {
        **_measured(found.seconds, device),
        "layer_s": round(both / len(source.moe_layers), 2),
    }


def _reset(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _measured(seconds: Mapping[str, float], device: str) -> dict[str, Any]:
    gpu = torch.cuda.max_memory_allocated() if device == "cuda" else None
    record = {
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "gpu_peak_bytes": gpu,
        "host_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
    print(record, file=sys.stderr, flush=True)
    return record


def _growth(source: SourceCheckpoint, whole: Mapping[str, Any]) -> Growth:
    layers = len(architecture_of(whole).facts(whole).moe_layers)
    plain = sum(entry.nbytes for shard in plain_shards(whole) for entry in shard.entries)
    total = plain + layers * source.layer_bytes
    mine = sum(source.nbytes(name) for name in source.plain_names())
    return Growth(layers / len(source.moe_layers), total / source.total_bytes, plain / mine)


_GROWS = {
    "check": "total",
    "copy": "plain",
    "layers": "layers",
    "load": "layers",
    "forward": "layers",
    "backward": "layers",
    "heads": "layers",
}
"""What a stage's time goes with; those that are not here (opening, the head) stay."""


def _grown(seconds: Mapping[str, float], growth: Growth) -> float:
    return sum(
        value * (getattr(growth, _GROWS[name]) if name in _GROWS else 1.0)
        for name, value in seconds.items()
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write; a UserError ends with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="pagedweight bench offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", choices=MODELS, help="whose shape")
    parser.add_argument("--layers", type=positive, default=2, help="layers that are made")
    parser.add_argument("--folder", type=Path, required=True, help="scratch; /dev/shm is quick")
    parser.add_argument("--sequences", type=positive, default=16)
    parser.add_argument("--sequence-length", type=positive, default=2048)
    parser.add_argument("--codes", choices=("compensated", "kmeans"), default="compensated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("-o", type=Path, default=Path("benchmarks/results/offline.json"))
    options = parser.parse_args(argv)
    config, whole = model_config(options.model, options.layers), model_config(options.model)
    sizes = (config["vocab_size"], options.sequences, options.sequence_length)
    text = random_tokens(*sizes, seed=0)
    key = (options.model, options.codes)
    run = measure(config, whole, options.folder, text, options.device, options.codes)
    try:
        device_of(options.device)
        check_target(options.o)
        before = read_record(options.o)["rows"] if options.o.exists() else []
        others = [row for row in before if (row.get("model"), row.get("codes")) != key]
        for row in run:  # what is there is kept, whatever becomes of the rest
            rows = [*others, {"model": options.model, **row}]
            write_record(options.o, {"question": QUESTION, "machine": machine(), "rows": rows})
    except UserError as error:
        print(f"offline: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(rows[-1], indent=1))


if __name__ == "__main__":
    main()
