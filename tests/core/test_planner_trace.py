"""Traces: replay to identical plans, what a crash leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner_world import pressure, world

from pagedweight.core.observation import Observation, RequestSignals, merge_signals
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import Planner, TableState
from pagedweight.core.policy import Policy
from pagedweight.core.trace import Trace, TraceRecorder
from pagedweight.errors import UserError


def record(path: Path, steps: int = 60) -> list[tuple[list[int], list[int]]]:
    """A load that rises and falls, changing signals, an aborted row, and the plans it made."""
    policy = replace(Policy(), dwell_steps=3, offload_blocks=4, reload_blocks=12, prior_tokens=8.0)
    context = world(3, policy, heads=True, page_bytes=4096)
    table, planner = WeightPageTable(context.index, context.sizes, 6), Planner(context)
    rng, plans, signals = np.random.default_rng(0), [], None
    with TraceRecorder(path, context, planner.queue) as recorder:
        for at in range(steps):
            if at % 7 == 0:
                features = rng.lognormal(3, 1, (2, 4, 2, 3)).astype(np.float32)
                mass = rng.lognormal(0, 1, (2, 4)).astype(np.float32)
                signals = merge_signals(
                    [RequestSignals(3, 40.0, mass, features)], context.calibration, 8.0
                )
            kv = pressure(0, pending=5 * at) if at < 30 else pressure(100 + at)
            state, seen = TableState.of(table), Observation(at, kv, signals if at > 2 else None)
            plan = planner.step(table, seen)
            recorder.record(state, seen, plan)
            plan.apply(table)
            plans.append((plan.rows.tolist(), plan.to_bits.tolist()))
            if plan.rows.size and at % 2:
                row = plan.rows[:1]
                if table.can_lower(row, plan.to_bits[:1]).all():
                    table.abort_lower(row, table.begin_lower(row, plan.to_bits[:1]))
    return plans


def test_replay_makes_the_same_plans(tmp_path: Path) -> None:
    plans = record(tmp_path / "trace.jsonl")
    trace = Trace.load(tmp_path / "trace.jsonl")
    assert not trace.truncated
    assert trace.differences() == []
    replayed = [(plan.rows.tolist(), plan.to_bits.tolist()) for _, plan in trace.replay()]
    assert replayed == plans
    kinds = {plan.kind for _, plan in trace.replay()}
    assert kinds == {"none", "offload", "reload"}


def test_a_changed_planner_shows(tmp_path: Path) -> None:
    record(tmp_path / "trace.jsonl")
    text = (tmp_path / "trace.jsonl").read_text()
    head, rest = text.split("\n", 1)
    changed = json.loads(head)
    changed["policy"]["offload_blocks"] = 9
    (tmp_path / "other.jsonl").write_text(json.dumps(changed) + "\n" + rest)
    assert Trace.load(tmp_path / "other.jsonl").differences()


def test_a_line_cut_short_is_left_out_and_said(tmp_path: Path) -> None:
    record(tmp_path / "trace.jsonl")
    whole = Trace.load(tmp_path / "trace.jsonl")
    text = (tmp_path / "trace.jsonl").read_text()
    (tmp_path / "cut.jsonl").write_text(text[:-5])
    cut = Trace.load(tmp_path / "cut.jsonl")
    assert cut.truncated
    assert len(cut.steps) == len(whole.steps) - 1
    assert cut.differences() == []


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "cannot read"),
        ("{}\n", "not a planner trace"),
        ('{"format": "pagedweight-trace", "format_version": 9}\n', "version 9"),
        ('{"format": "pagedweight-trace", "format_version": 1}\n', "cannot read"),
    ],
)
def test_what_is_not_a_trace_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(UserError, match=told):
        Trace.load(tmp_path / "bad.jsonl")
    with pytest.raises(UserError, match="cannot read"):
        Trace.load(tmp_path / "absent.jsonl")
