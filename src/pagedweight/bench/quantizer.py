"""How far from optimal are the codes, how fast are they found, and in how much memory?

Error: rows of a trained model, weighted by E[x_c^2] over routed tokens, against the exact optimum
of each number of clusters. Speed: rows of random normal weights, as bfloat16 sources and float32
sources have them. Memory: peak of `pagedweight quantize` on the model in a process of its own.

    python -m pagedweight.bench.quantizer [--model DIR] [--text FILE] [-o FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedweight.bench.exact_clusters import optimal_errors
from pagedweight.bench.record import machine, seconds, write_record
from pagedweight.calibrate.stream import StreamedMoments
from pagedweight.calibrate.text import CalibrationChoice, load_tokens
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.core.geometry import KINDS
from pagedweight.quantize.rows import DEFAULT_LEVELS, quantize_rows

MODELS = (Path("../shared/models/lab-moe"), Path("models/tiny-moe"))
TEXTS = ("../shared/eval/c4/c4_validation_first1000.jsonl:500-999", "docs/design.md")
"""The first that is there; the result says which."""
ROWS = 200
WIDTHS = (512, 1408, 2048)
SPEED_ROWS = 4000

Row = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


def sample_rows(source: SourceCheckpoint, text: str, rows: int) -> Iterator[Row]:
    """(weights, importance) of rows drawn evenly over layers, experts and kinds; seed 0."""
    tokens = load_tokens(CalibrationChoice(text, 4, 512), source.path, None).tokens
    rng, layers = np.random.default_rng(0), len(source.moe_layers)
    with tempfile.TemporaryDirectory() as scratch:
        streamed = StreamedMoments(source, tokens, torch.device("cpu"), Path(scratch))
        for layer in range(source.moe_layers[-1] + 1):
            found = streamed.advance(layer)
            if found is None:
                continue
            moments, read = found
            position = source.moe_layers.index(layer)
            share = rows * (position + 1) // layers - rows * position // layers
            blocks = [(e, kind) for e in range(source.shape.experts) for kind in KINDS]
            matrices = {block: read(*block).float().numpy() for block in blocks}
            for number in range(share):
                expert, kind = blocks[number % len(blocks)]
                weights = matrices[expert, kind]
                yield weights[rng.integers(len(weights))], moments.second_moment[kind][expert]


def error_rows(source: SourceCheckpoint, text: str, rows: int) -> list[dict[str, Any]]:
    """Per level, the weighted error over the optimum's (1.0 is optimal).

    `codes`: with exact means, so the clusters alone are judged. `stored`: as written, centroids
    rounded; `stored_sum` is all rows' error over all rows' optimum. The optimum at a level is that
    of 2^b clusters without nesting, unrounded.
    """
    codes, stored, sums = [], [], np.zeros((2, len(DEFAULT_LEVELS)))
    for weights, importance in sample_rows(source, text, rows):
        h = importance.astype(np.float64)
        best = optimal_errors(weights, h, 1 << max(DEFAULT_LEVELS))
        optimum = best[[(1 << b) - 1 for b in DEFAULT_LEVELS]]
        result = quantize_rows(weights[None], h, table_dtype="bfloat16")
        top = max(DEFAULT_LEVELS)
        exact = [_means_error(weights, h, result.codes[0] >> (top - b)) for b in DEFAULT_LEVELS]
        codes.append(np.array(exact) / optimum)
        stored.append(result.row_error[0] / optimum)
        sums += result.row_error[0], optimum
    return [
        {
            "bits": bits,
            "codes_mean": float(f"{np.mean(codes, axis=0)[at]:.6f}"),
            "codes_median": float(f"{np.median(codes, axis=0)[at]:.6f}"),
            "codes_worst": float(f"{np.max(codes, axis=0)[at]:.6f}"),
            "stored_mean": float(f"{np.mean(stored, axis=0)[at]:.6f}"),
            "stored_worst": float(f"{np.max(stored, axis=0)[at]:.6f}"),
            "stored_sum": float(f"{sums[0, at] / sums[1, at]:.6f}"),
        }
        for at, bits in enumerate(DEFAULT_LEVELS)
    ]


def _means_error(
    weights: npt.NDArray[np.float32], h: npt.NDArray[np.float64], codes: npt.NDArray[np.uint8]
) -> float:
    x = weights.astype(np.float64)
    weight = np.bincount(codes, weights=h)
    mean = np.bincount(codes, weights=h * x) / np.where(weight > 0, weight, 1)
    return float((h * (x - mean[codes]) ** 2).sum())


def speed_rows() -> list[dict[str, Any]]:
    """Rows a second at each width: best of three runs, and processor time of one."""
    backends = [("numba", "cpu")] + ([("torch", "cuda")] if torch.cuda.is_available() else [])
    found = []
    for backend, device in backends:
        for width in WIDTHS:
            for dtype in ("bfloat16", "float32"):
                generator = torch.Generator().manual_seed(width)
                weights = torch.randn((SPEED_ROWS, width), generator=generator) * 0.03
                weights = weights.to(getattr(torch, dtype)).float().to(device)
                importance = torch.rand(width, generator=generator) + 0.1

                def work(w=weights, h=importance, b=backend) -> None:
                    quantize_rows(w, h, backend=b)

                best = seconds(work, 3)
                before = os.times()
                work()
                used = os.times().user - before.user + os.times().system - before.system
                found.append(
                    {
                        "backend": backend,
                        "width": width,
                        "source": dtype,
                        "rows_per_s": round(SPEED_ROWS / best),
                        "rows_per_minute": round(60 * SPEED_ROWS / best),
                        "cpu_us_per_row": round(1e6 * used / SPEED_ROWS, 1),
                    }
                )
    return found


CHILD = """
import sys
from pathlib import Path
from pagedweight.cli.main import main
import numpy, torch, transformers
from transformers import AutoModel, AutoTokenizer
from pagedweight.calibrate import stream, text
from pagedweight.quantize import pipeline, rows
rows.quantize_rows(numpy.ones((1, 64), numpy.float32), None)
try:
    if sys.argv[1:] and sys.argv[1] != "tokenize":
        main(sys.argv[1:])
    elif sys.argv[1:]:
        text.load_tokens(text.CalibrationChoice(sys.argv[3]), Path(sys.argv[2]), None)
finally:
    lines = open("/proc/self/status").read().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""
"""Prints its own peak in KiB: of imports and compiled loops, and what its arguments ask for."""


def memory_record(model: Path, source: SourceCheckpoint, text: str) -> dict[str, Any]:
    """Peak resident bytes of `pagedweight quantize` and what they are made of."""
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "out")
        quantize = ["quantize", str(model), "-o", out, "--calibration", text]
        imports, tokenized, peak = (
            _peak_bytes(args) for args in ([], ["tokenize", str(model), text], quantize)
        )
    activations = 4 * CalibrationChoice.sequences * CalibrationChoice.sequence_length
    return {
        "command": "quantize --calibration, 16 sequences of 2,048 tokens",
        "peak_bytes": peak,
        "imports_bytes": imports,
        "beyond_imports_bytes": peak - imports,
        "tokenizing_beyond_imports_bytes": tokenized - imports,
        "one_layer_bytes": source.layer_bytes,
        "largest_tensor_bytes": max(source.nbytes(name) for name in source.files),
        "activations_bytes": activations * source.shape.hidden,
        "model_bytes": source.total_bytes,
    }


def _peak_bytes(args: list[str]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *args], stdout=subprocess.PIPE, text=True, check=True
    )
    return 1024 * int(done.stdout.split()[-1])


def _first_there(names: tuple[str, ...]) -> str:
    """The first name whose file exists; a range after a colon is not part of the file."""
    for name in names:
        if Path(name.partition(":")[0]).exists():
            return name
    raise SystemExit(f"none of {', '.join(names)} is here; run from the repository's root")


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("-o", type=Path, default=Path("benchmarks/results/quantizer.json"))
    parser.add_argument("--model", default=None, help="a source checkpoint")
    parser.add_argument("--text", default=None, help="calibration text, FILE[:FIRST-LAST]")
    options = parser.parse_args()
    model = Path(options.model or _first_there(tuple(map(str, MODELS))))
    text = options.text or _first_there(TEXTS)
    source = SourceCheckpoint.open(model)
    record = {
        "question": "error against the exact optimum, rows a second, peak memory of quantize",
        "machine": {**machine(), "load_before": round(os.getloadavg()[0], 1)},
        "model": model.name,
        "text": Path(text).name,
        "rows": ROWS,
        "error_over_optimum": error_rows(source, text, ROWS),
        "speed": speed_rows(),
        "memory": memory_record(model, source, text),
    }
    for part in ("error_over_optimum", "speed", "memory"):
        print(part, *(record[part] if part != "memory" else [record[part]]), sep="\n  ")
    write_record(options.o, record)


if __name__ == "__main__":
    main()
