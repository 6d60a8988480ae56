"""What `bench movement` makes of an engine's steps; the engine here only counts."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pagedweight.bench import movement
from pagedweight.bench.movement_engine import POLICY
from pagedweight.memory.cuda import device as cuda_device

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "memory"))  # fake_driver

from fake_driver import FakeDriver

BLOCKS, START, MOST = 4, 10, 40
"""Blocks in a granule, granules at the start and at the floor."""


class Engine:
    """A granule comes, or goes back, in every step."""

    def __init__(self):
        self.granule_blocks, self.block_bytes, self.granules = BLOCKS, 1 << 20, MOST
        self.setting = SimpleNamespace(memory=1 << 30)
        self.usable, self.host_seconds, self.steps, self.moved = START, [], 0, 0
        self.host_parts = []
        counters = SimpleNamespace(as_dict=lambda: dict.fromkeys(NAMES, self.moved))
        self.worker = SimpleNamespace(counters=counters, pages_per_step=None)
        self.controller = SimpleNamespace(granules=self, status=None)

    @property
    def usable_blocks(self):
        return self.usable * BLOCKS

    def free_blocks(self):
        return self.usable * BLOCKS + 100

    def settled(self):
        return self.usable == START

    def step(self, pending):
        left = self.free_blocks() - pending
        if left <= POLICY.offload_blocks:
            self.usable, self.moved = self.usable + 1, self.moved + 7
        elif left > POLICY.reload_blocks and self.usable > START:
            self.usable -= 1
        self.host_seconds.append(1e-3)
        self.host_parts.append({"plan": 4e-4, "map": 1e-4})
        self.steps += 1
        return self.steps * 2e-3


NAMES = ("uploaded_bytes", "compacted_bytes", "rolled_back", "reclaimed_pages")


@pytest.fixture
def engine(monkeypatch):
    made = Engine()
    clock = SimpleNamespace(perf_counter=lambda: made.steps * 2e-3)
    monkeypatch.setattr(movement, "time", clock)
    return made


def test_all_repeats_count_but_the_first(engine):
    row = movement.measure(engine, 5 * BLOCKS << 20, repeats=3)
    assert (row["bytes"], row["repeats"], row["rolled_back"]) == (5 * BLOCKS << 20, 3, 35)
    assert row["to_kv_steps"] == row["back_steps"] == 5
    times = [row[name] for name in ("to_kv_ms", "to_kv_worst_ms", "back_ms", "back_worst_ms")]
    assert times == pytest.approx([10.0] * 4)
    for way in movement.WAYS:
        assert row[f"{way}_step_p99_ms"] == pytest.approx(2.0)
        assert row[f"{way}_host_max_ms"] == pytest.approx(1.0)
    assert row["to_kv_parts_ms"] == {"plan": 2.0, "map": 0.5, "rest": 2.5}
    assert row["back_worst_parts_ms"] == {"plan": 0.4, "map": 0.1, "rest": 0.5}
    assert engine.usable == START
    there = movement.SETTLING_STEPS + movement.THERE_STEPS
    assert engine.steps == 4 * (5 + there + 5)


def test_more_than_kv_can_reach_is_said(engine):
    with pytest.raises(ValueError, match="more than KV can reach"):
        movement.measure(engine, 31 * BLOCKS << 20, repeats=1)


def test_a_row_for_every_limit_and_size_as_it_is_measured(engine, monkeypatch, capsys):
    limits, rows = [], []
    engine.usable_granules, engine.close = START, lambda: limits.append("closed")
    monkeypatch.setattr(movement, "MovementEngine", lambda setting: engine)

    def told(row):
        rows.append((row["pages_per_step"], row["bytes"]))
        limits.append(engine.worker.pages_per_step)

    sizes = [BLOCKS / 1024, 2 * BLOCKS / 1024]
    setting = SimpleNamespace(page_bytes=16 << 20, rows_per_batch=8)
    movement.run(setting, sizes, [12, 0], 2, told)
    small, large = BLOCKS << 20, 2 * BLOCKS << 20
    assert rows == [(12, small), (12, large), (None, small), (None, large)]
    assert limits == [12, 12, None, None, "closed"]
    assert "any number of pages a step" in capsys.readouterr().out


@pytest.fixture
def bare_gpu(monkeypatch):
    """A fake driver without a context, as a process begins; torch makes one, as the real one does,
    when a stream is waited for."""
    driver = FakeDriver(total_pages=600)
    driver.context = None

    def synchronize(_=None):
        driver.context = 7

    stream = SimpleNamespace(synchronize=synchronize)
    for name, stand_in in (
        ("is_available", lambda: True),
        ("get_device_name", lambda: "a GPU"),
        ("current_device", lambda: 0),
        ("device", lambda device: nullcontext()),
        ("current_stream", lambda device=None: stream),
        ("Stream", lambda device: stream),
        ("synchronize", synchronize),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_device, "bindings", lambda: driver)
    return driver


def test_the_drivers_costs_come_first_and_need_no_engine(bare_gpu, monkeypatch, tmp_path):
    """What calls of the driver need, a context, is there before the first; all is given back."""

    def run(setting, sizes, most_pages, repeats, told):
        assert not bare_gpu.handles
        assert bare_gpu.free == bare_gpu.total
        told({"bytes": 7})

    monkeypatch.setattr(movement, "run", run)
    movement.main(["--json", str(tmp_path), "--gib", "1"])
    found = json.loads((tmp_path / "movement.json").read_text())
    rows = [(row["tolerant"], row["pages"]) for row in found["driver"]]
    assert rows == [(tolerant, count) for tolerant in (False, True) for count in (1, 8, 64, 512)]
    assert all(row["map_us"] > 0 and row["unmap_us"] > 0 for row in found["driver"])
    assert [row["bytes"] for row in found["rows"]] == [7]
