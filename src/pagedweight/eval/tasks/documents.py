"""Documents of the tasks, out of local files; lm-eval calls these by name from the YAML files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedweight.checkpoint.shards import read_json
from pagedweight.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

_PROMPTS = "long/dataset2prompt.json"
_POOL = 20
"""Examples are looked for among this many problems at a file's end."""


def problems(data_dir: str, file: str, shots: int, **_: Any) -> dict[str, Dataset]:
    """Splits `test` and `shots` of a file of problems without a training split.

    The `shots` shortest of the file's last 20 problems are the examples, and are not scored: short
    ones leave room in small contexts.
    """
    rows = read_rows(Path(data_dir) / file)
    if len(rows) <= shots:
        raise UserError(f"{file} has {len(rows)} problems; {shots} of them are needed as examples")
    pool = range(max(0, len(rows) - _POOL), len(rows))
    examples = sorted(sorted(pool, key=lambda n: len(json.dumps(rows[n])))[:shots])
    scored = [row for n, row in enumerate(rows) if n not in examples]
    return {"test": _dataset(scored), "shots": _dataset([rows[n] for n in examples])}


def long_items(data_dir: str, file: str, prompt: str, **_: Any) -> dict[str, Dataset]:
    """Split `test` of a file in LongBench's schema, with LongBench's prompt filled in."""
    template = read_json(Path(data_dir) / _PROMPTS)[prompt]
    rows = read_rows(Path(data_dir) / file)
    filled = [
        {"prompt": template.format(**row), "answers": row["answers"], "_id": row["_id"]}
        for row in rows
    ]
    return {"test": _dataset(filled)}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """JSON lines; UserError naming the file and the line that is none."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON: {error}") from error
    return rows


def _dataset(rows: list[dict[str, Any]]) -> Dataset:
    from datasets import Dataset

    return Dataset.from_list(rows)
