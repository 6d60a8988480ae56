"""What do the tasks say at several precisions? Reports of `eval --tasks --json` as one result file.

pagedweight eval OUT --tasks gsm8k,qmsum --data-dir DIR --limit 10 --bits 3 --json > 3.json
pagedweight eval MODEL --tasks gsm8k,qmsum --data-dir DIR --limit 10 --json > source.json
python -m pagedweight.bench.tasks 3.json source.json -o benchmarks/results/tasks.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedweight.bench.record import machine, write_record
from pagedweight.checkpoint.shards import read_json
from pagedweight.errors import UserError, listing

_SHARED = ("context", "lm_eval", "engine", "dtype")
"""What all reports must have in common to stand in one table."""


def rows_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a task, without the values of single items; bits are "source" when unquantized."""
    precision = report["precision"]
    head: dict[str, Any] = {"model": Path(report["path"]).name, "bits": "source"}
    if precision is not None:
        head["bits"] = precision["mean_bits"]
        head["bytes"] = precision.get("budget_bytes") or precision["expert_bytes"]
        head["policy"] = "paged" if "budget_bytes" in precision else "fixed"
    return [
        {**head, **{name: value for name, value in row.items() if name != "values"}}
        for row in report["tasks"]
    ]


def record_of(paths: Sequence[Path]) -> dict[str, Any]:
    """The result file's content; UserError for a file that is no report, or one unlike the others.

    Reports are alike when context, engine, type and lm-eval's version are the same.
    """
    reports = [read_json(path) for path in paths]
    if strange := [str(p) for p, r in zip(paths, reports, strict=True) if "tasks" not in r]:
        raise UserError(f"not written by eval --tasks --json: {listing(strange)}")
    for name in _SHARED:
        values = {str(report[name]) for report in reports}
        if len(values) > 1:
            raise UserError(f"the reports have different {name}: {listing(sorted(values))}")
    return {
        "question": "scores of tasks with answers, in [0, 1] with a 95% interval over items "
        "(Wilson's for right or wrong, else bootstrap), on the vLLM engine; a row with a caveat is "
        "not the published benchmark",
        **{name: reports[0][name] for name in _SHARED},
        "machine": machine(),
        "rows": [row for report in reports for row in rows_of(report)],
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows as a Markdown table."""
    print("| task | score | bits | value | items | cut |\n|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row["task"]):
        label = f"{row['label']} ({row['caveat']})" if row["caveat"] else row["label"]
        value = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        cells = (label, row["metric"], row["bits"], value, row["items"], row["truncated"])
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    """Read, write and print; a UserError ends with exit code 2."""
    parser = argparse.ArgumentParser(description="reports of eval --tasks as one result file")
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("-o", type=Path, required=True)
    options = parser.parse_args()
    try:
        record = record_of(options.reports)
    except UserError as error:
        print(f"tasks: {error}", file=sys.stderr)
        sys.exit(2)
    write_record(options.o, record)
    show(record["rows"])


if __name__ == "__main__":
    main()
