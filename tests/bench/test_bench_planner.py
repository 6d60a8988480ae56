"""The planner benchmark runs, checks its plans against full sorting, and writes what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagedweight.bench import planner
from pagedweight.core.observation import KVPressure, Observation
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import PlanQueue, TableState, plan_step


def test_writes_one_row_for_every_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planner, "MODELS", {"mixtral-8x7b": planner.MODELS["mixtral-8x7b"]})
    planner.main(["--steps", "2", "--output", str(tmp_path / "planner.json")])
    written = json.loads((tmp_path / "planner.json").read_text())
    kinds = {row["case"]: row["kind"] for row in written["rows"]}
    assert kinds["offload 30%, new signals"] == "offload"
    assert kinds["idle, kept signals"] == "none"
    assert kinds["reload, new signals"] == "reload"
    assert all(row["rows"] == 512 and row["wall_p50"] > 0 for row in written["rows"])
    assert "offload 30%, new signals" in capsys.readouterr().out


def test_the_check_catches_a_wrong_plan() -> None:
    context = planner.context_for(*planner.MODELS["mixtral-8x7b"])
    state = TableState.of(WeightPageTable(context.index, context.sizes, 6))
    kv = KVPressure(planner.BLOCK_BYTES, 1 << 20, 2000, 0, pending_blocks=800)
    _, plan = plan_step(state, Observation(0, kv), context, PlanQueue())
    planner.check(context, plan, None, 6)
    with pytest.raises(AssertionError):
        planner.check(context, replace(plan, returned_bytes=plan.target_bytes - 1), None, 6)
    with pytest.raises(AssertionError):
        planner.check(context, replace(plan, damage=2 * plan.damage), None, 6)
