"""Reports of `eval --tasks` in one table."""

from __future__ import annotations

import json

import pytest

from pagedweight.bench.tasks import record_of, show
from pagedweight.errors import UserError

ROW = {
    "task": "qmsum", "label": "qmsum", "caveat": "not LongBench's own file", "metric": "rouge_l",
    "value": 0.1, "low": 0.0, "high": 0.2, "items": 2, "truncated": 1, "values": [0.0, 0.2],
}  # fmt: skip


def write(path, precision, **changes):
    report = {"path": "/somewhere/model", "engine": "vllm", "dtype": "auto", "context": 2048}
    report |= {"lm_eval": "0.4.13", "precision": precision, "tasks": [ROW], **changes}
    path.write_text(json.dumps(report))
    return path


def test_rows_carry_precision_and_caveat(tmp_path, capsys):
    fixed = write(tmp_path / "a.json", {"mean_bits": 3.0, "uniform": True, "expert_bytes": 100})
    paged = write(tmp_path / "b.json", {"mean_bits": 2.5, "budget_bytes": 90, "policy": None})
    source = write(tmp_path / "c.json", None)
    record = record_of([fixed, paged, source])
    found = [(r["bits"], r.get("bytes"), r.get("policy"), r["model"]) for r in record["rows"]]
    assert found == [
        (3.0, 100, "fixed", "model"),
        (2.5, 90, "paged", "model"),
        ("source", None, None, "model"),
    ]
    assert all("values" not in row for row in record["rows"])
    show(record["rows"])
    shown = capsys.readouterr().out
    assert shown.count("qmsum (not LongBench's own file)") == 3
    assert "0.100 [0.000, 0.200]" in shown


def test_reports_that_cannot_stand_together(tmp_path):
    one, other = write(tmp_path / "a.json", None), write(tmp_path / "b.json", None, context=4096)
    with pytest.raises(UserError, match="different context: 2048, 4096"):
        record_of([one, other])
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(UserError, match=r"not written by eval --tasks --json: .*c\.json"):
        record_of([tmp_path / "c.json"])
