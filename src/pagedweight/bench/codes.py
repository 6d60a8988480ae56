"""Do codes whose errors cancel serve the model better than plain ones, at equal bytes?

Mean KL to the source of two quantized checkpoints at every uniform level, on the same windows, and
the share by which OTHER's lies below or above PLAIN's, with a paired bootstrap over windows. Rows
of other texts that FILE already has stay, so that texts can be measured one at a time.

    python -m pagedweight.bench.codes PLAIN OTHER MODEL -o benchmarks/results/codes.json \\
        --text c4 c4_validation_first1000.jsonl:0-499 8
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pagedweight.bench.record import machine, write_record
from pagedweight.checkpoint.manifest import CALIBRATION
from pagedweight.checkpoint.plan import uniform_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.tensorfile import TensorFile
from pagedweight.errors import UserError
from pagedweight.eval.evaluate import score
from pagedweight.eval.reference import load_plain, load_quantized
from pagedweight.eval.statistics import bootstrap, paired, perplexity
from pagedweight.eval.windows import WindowChoice, cut_windows

SEED = 0
_CPU = torch.device("cpu")


def measure(
    plain: Checkpoint, other: Checkpoint, source: Path, name: str, tokens: torch.Tensor
) -> list[dict[str, Any]]:
    """A row for each level and each of the two checkpoints."""
    if plain.bits != other.bits:
        raise UserError(f"levels {plain.bits} of {plain.path} are not {other.bits} of {other.path}")
    folders = (("plain", plain), ("other", other))
    models = [
        load_quantized(folder, uniform_plan(folder, bits), torch.float32, _CPU)
        for _, folder in folders
        for bits in folder.bits
    ]
    start = time.perf_counter()
    scores = score(models, load_plain(source, torch.float32, _CPU), tokens, lambda *_: None)
    print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if scores.kl is None:
        raise ValueError("no source among the scores")
    rows, levels = [], len(plain.bits)
    for number, (which, folder) in enumerate(folders):
        for level, bits in enumerate(folder.bits):
            kl, before = scores.kl[number * levels + level], scores.kl[level]
            row = {
                "text": name,
                "windows": tokens.shape[0],
                "window": tokens.shape[1],
                "bits": bits,
                "codes": _metadata(folder).get("codes", "kmeans"),
                "kl": asdict(bootstrap(kl, SEED)),
                "perplexity": asdict(perplexity(scores.nll[number * levels + level], SEED)),
                "kl_by_window": [float(f"{v:.6g}") for v in kl],
            }
            if which == "other":
                row["kl_against_plain"] = asdict(paired([kl], [before], SEED)[1])
            rows.append(row)
    return rows


def _metadata(checkpoint: Checkpoint) -> dict[str, str]:
    return dict(TensorFile.open(checkpoint.path / CALIBRATION).metadata)


def show(rows: list[dict[str, Any]]) -> None:
    """The rows as a Markdown table."""
    print("| text | bits | codes | KL to the source | against plain |\n|---|---|---|---|---|")
    for row in rows:
        kl, share = row["kl"], row.get("kl_against_plain")
        shown = (
            f"{100 * share['mean']:+.1f}% [{100 * share['low']:+.1f}, {100 * share['high']:+.1f}]"
            if share
            else ""
        )
        print(
            f"| {row['text']} | {row['bits']} | {row['codes']} | "
            f"{kl['mean']:.5f} [{kl['low']:.5f}, {kl['high']:.5f}] | {shown} |"
        )


def main() -> None:
    """Measure, print and write; a UserError ends with exit code 2."""
    parser = argparse.ArgumentParser(description="KL of two quantized checkpoints, paired")
    for name in ("plain", "other", "model"):
        parser.add_argument(name, type=Path)
    parser.add_argument(
        "--text", nargs=3, action="append", required=True, metavar=("NAME", "FILE", "WINDOWS")
    )
    parser.add_argument("-o", type=Path, required=True)
    options = parser.parse_args()
    rows = json.loads(options.o.read_text())["rows"] if options.o.exists() else []
    try:
        plain, other = Checkpoint.open(options.plain), Checkpoint.open(options.other)
        for name, file, windows in options.text:
            choice = WindowChoice(file, windows=int(windows), seed=SEED)
            tokens = cut_windows(choice, plain.path)
            rows = [row for row in rows if row["text"] != name]
            rows += measure(plain, other, options.model, name, tokens)
    except UserError as error:
        print(f"codes: {error}", file=sys.stderr)
        sys.exit(2)
    record = {
        "question": "mean KL to the source (nats, 95% bootstrap over windows) of k-means and of "
        "compensated codes at every uniform level, same windows, reference engine in float32",
        "calibration": {"plain": _metadata(plain), "other": _metadata(other)},
        "machine": machine(),
        "rows": rows,
    }
    write_record(options.o, record)
    show(rows)


if __name__ == "__main__":
    main()
