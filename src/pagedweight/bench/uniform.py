"""What does uniform precision cost? Perplexity and KL to the source at every stored level.

All levels and the source run on the same windows in the reference engine, in float32. All models
are in memory together, so that the source runs each window once: for models of laptop size.

    python -m pagedweight.bench.uniform OUT MODEL -o benchmarks/results/uniform_lab.json \\
        --text wikitext2-test wiki.test.raw all --text c4 c4_validation_first1000.jsonl:0-499 60
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagedweight.bench.record import machine, write_record
from pagedweight.checkpoint.manifest import CALIBRATION
from pagedweight.checkpoint.plan import uniform_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.tensorfile import TensorFile
from pagedweight.errors import UserError
from pagedweight.eval.evaluate import Scores, expert_bytes, measures, score
from pagedweight.eval.reference import load_plain, load_quantized
from pagedweight.eval.statistics import perplexity
from pagedweight.eval.windows import WindowChoice, cut_windows

SEED = 0
_CPU = torch.device("cpu")


def measure(
    checkpoint: Checkpoint, model: Path, texts: dict[str, WindowChoice]
) -> list[dict[str, Any]]:
    """One row for the source and one for each level, for each text."""
    windows = {name: cut_windows(choice, checkpoint.path) for name, choice in texts.items()}
    plans = {bits: uniform_plan(checkpoint, bits) for bits in checkpoint.bits}
    base = load_plain(model, torch.float32, _CPU)
    models = [load_quantized(checkpoint, plan, torch.float32, _CPU) for plan in plans.values()]
    rows = []
    for name, tokens in windows.items():
        start = time.perf_counter()
        scores = score(models, base, tokens, partial(_tell, name))
        seconds = time.perf_counter() - start
        at = {"text": name, "windows": tokens.shape[0], "window": tokens.shape[1]}
        rows.append({**at, "bits": "source", **_source(scores), "seconds": round(seconds)})
        for row, (bits, plan) in enumerate(plans.items()):
            found = measures(scores, row, SEED)
            rows.append({**at, "bits": bits, "bytes": expert_bytes(checkpoint, plan), **found})
    return rows


def _source(scores: Scores) -> dict[str, Any]:
    if scores.base_nll is None:
        raise ValueError("no source among the scores")
    return {"perplexity": vars(perplexity(scores.base_nll, SEED))}


def _tell(name: str, done: int, total: int) -> None:
    if done % 10 == 0 or done == total:
        print(f"{name}: {done} of {total} windows", file=sys.stderr, flush=True)


def _choice(name: str, file: str, windows: str) -> tuple[str, WindowChoice]:
    if windows != "all" and not windows.isdecimal():
        raise UserError(f"--text {name}: {windows} is not a number of windows, and not `all`")
    return name, WindowChoice(file, windows=None if windows == "all" else int(windows), seed=SEED)


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a Markdown table."""
    print("| text | bits | experts, MB | perplexity | KL to the source |\n|---|---|---|---|---|")
    for row in rows:
        kl = row.get("kl")
        shown = f"{kl['mean']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]" if kl else ""
        size = f"{row['bytes'] / 1e6:.1f}" if "bytes" in row else ""
        mean = row["perplexity"]["mean"]
        print(f"| {row['text']} | {row['bits']} | {size} | {mean:.2f} | {shown} |")


def main() -> None:
    """Measure, print and write; a UserError ends with exit code 2."""
    parser = argparse.ArgumentParser(description="perplexity and KL at every uniform level")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", nargs=3, action="append", required=True)
    parser.add_argument("-o", type=Path, required=True)
    options = parser.parse_args()
    try:
        checkpoint = Checkpoint.open(options.checkpoint)
        rows = measure(checkpoint, options.model, dict(_choice(*t) for t in options.text))
    except UserError as error:
        print(f"uniform: {error}", file=sys.stderr)
        sys.exit(2)
    calibration = TensorFile.open(options.checkpoint / CALIBRATION).metadata
    record = {
        "question": "perplexity and mean KL to the source (nats, 95% bootstrap over windows) of "
        "uniform levels, reference engine in float32",
        "calibration": dict(calibration),
        "machine": machine(),
        "rows": rows,
    }
    write_record(options.o, record)
    show(rows)


if __name__ == "__main__":
    main()
