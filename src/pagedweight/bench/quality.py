"""What does quality cost in bytes, by policy, and what is each part of the planner worth?

`pagedweight eval --frontier` and `--ablation` in one pass over the texts, which may be shared out
among processes: each measures some texts into a file, `--merge` makes the results of all of them.

    python -m pagedweight.bench.quality OUT MODEL --text c4=c4.jsonl:0-499 --part a.npz
    python -m pagedweight.bench.quality OUT MODEL --text code=code.txt --part b.npz
    python -m pagedweight.bench.quality OUT MODEL --merge a.npz b.npz -o benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pagedweight.core.policies import LOADS
from pagedweight.errors import UserError
from pagedweight.eval.ablation import WHOLE, Ablation, configurations
from pagedweight.eval.frontier import BUDGETS, CANDIDATES, Cell, Frontier, cells_of
from pagedweight.eval.picture import draw_ablation, draw_frontier
from pagedweight.eval.results import ablation_record, frontier_record, setting, write_results
from pagedweight.eval.study import Study, StudyOptions
from pagedweight.eval.windows import named_choices

ABLATED = ("2.5b", "3b", "4b")
BASE = "base_nll"
FIELDS = ("kl", "nll", "mean_bits", "resident_bytes", "read_bytes")
Arrays = dict[str, Any]
Key = tuple[str, int, str]
"""(text, budget in bytes, policy or configuration without a part)."""


def measure(study: Study, budgets: Sequence[str], ablated: Sequence[str]) -> Arrays:
    """Every policy at every budget and every configuration at those of `ablated`, text by text."""
    found: Arrays = {}
    parts = {k: v for k, v in configurations(study.policy).items() if k != WHOLE}
    for text in study.tokens:
        keys: list[Key] = [(text, study.budget(b), p) for b in budgets for p in CANDIDATES]
        lanes = [study.lane(policy, size, text) for _, size, policy in keys]
        for budget in ablated:
            for name, policy in parts.items():
                keys.append((text, study.budget(budget), name))
                lanes.append(study.lane("paged", study.budget(budget), text, policy))
        start = time.perf_counter()
        scores = study.score(text, lanes, lambda *_: None)
        print(
            f"{text}: {len(scores.base_nll)} windows of {len(lanes)} in "
            f"{time.perf_counter() - start:.0f} s",
            file=sys.stderr,
            flush=True,
        )
        found[f"{text}|{BASE}"] = scores.base_nll
        for (_, size, name), cell in zip(keys, cells_of(scores), strict=True):
            for field in FIELDS:
                found[f"{text}|{size}|{name}|{field}"] = np.asarray(getattr(cell, field))
    told = setting(study)
    for text in study.tokens:
        told["texts"][text][0] = len(found[f"{text}|{BASE}"])
    found["setting"] = np.array(json.dumps(told))
    return found


def merge(paths: Sequence[Path], model: str, seed: int) -> tuple[Frontier, Ablation, Arrays]:
    """The parts together: frontier, ablation, and the setting with the windows of all texts."""
    whole = Frontier(model, seed)
    cells: dict[int, dict[str, dict[str, Cell]]] = {}
    told: Arrays = {}
    for path in paths:
        with np.load(path) as stored:
            arrays = dict(stored)
        one = json.loads(str(arrays.pop("setting")))
        told = one | {"texts": told.get("texts", {}) | one["texts"]}
        groups: dict[Key, Arrays] = {}
        for name, value in arrays.items():
            text, *rest = name.split("|")
            if rest == [BASE]:
                whole.base_nll[text] = value
                continue
            size, policy, field = rest
            groups.setdefault((text, int(size), policy), {})[field] = value
        for (text, size, policy), fields in groups.items():
            cell = Cell(fields["kl"], fields["nll"], *(float(fields[name]) for name in FIELDS[2:]))
            if policy in CANDIDATES:
                whole.cells.setdefault(text, {})[policy, size] = cell
            cells.setdefault(size, {}).setdefault(text, {})[policy] = cell
    named = {
        s: t for s, t in cells.items() if any(n not in CANDIDATES for n in next(iter(t.values())))
    }
    return whole, Ablation(seed, named), told


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a part, or merge; a UserError ends with exit code 2."""
    parser = argparse.ArgumentParser(description="quality by policy and bytes, and the ablation")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE[:FIRST-LAST]")
    parser.add_argument("--part", type=Path, help="measure, and write every window's numbers there")
    parser.add_argument("--merge", type=Path, nargs="+", help="parts to make results of")
    parser.add_argument("-o", type=Path, help="folder for quality.json, ablation.json, pictures")
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument("--ablated", default=",".join(ABLATED))
    parser.add_argument("--windows", type=int)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--policy-file", type=Path)
    parser.add_argument("--load", choices=LOADS, default=LOADS[0])
    parser.add_argument("--replan-tokens", type=int)
    parser.add_argument("--oracle-windows", type=int, default=16)
    parser.add_argument("--seats", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="a text; then it ends")
    options = parser.parse_args(arguments)
    try:
        if options.merge:
            _write(options)
        else:
            _measure(options)
    except UserError as error:
        print(f"quality: {error}", file=sys.stderr)
        sys.exit(2)


def _measure(options: argparse.Namespace) -> None:
    if not options.text or options.part is None:
        raise UserError("give --text NAME=FILE and --part FILE to measure, or --merge and -o")
    study = Study(
        StudyOptions(
            path=options.checkpoint,
            model=options.model,
            texts=named_choices(options.text, options.window, options.windows, 0),
            policy=options.policy_file,
            load=options.load,
            replan_tokens=options.replan_tokens,
            device=options.device,
            dtype=options.dtype,
            seats=options.seats,
            seconds=options.seconds,
            oracle_windows=options.oracle_windows,
        )
    )
    budgets, ablated = options.budgets.split(","), options.ablated.split(",")
    if extra := [budget for budget in ablated if budget not in budgets]:
        raise UserError(f"--ablated {','.join(extra)}: not among --budgets")
    np.savez_compressed(options.part, **measure(study, budgets, ablated))


def _write(options: argparse.Namespace) -> None:
    if options.o is None:
        raise UserError("--merge needs -o, the folder for the results")
    found, parts, told = merge(options.merge, options.model.name, 0)
    rows, taken = found.rows(), parts.rows()
    write_results(options.o / "quality.json", frontier_record(told, rows, found.comparisons()))
    write_results(options.o / "ablation.json", ablation_record(told, taken))
    draw_frontier(rows, options.o / "frontier.png")
    draw_ablation(taken, options.o / "ablation.png")


if __name__ == "__main__":
    main()
