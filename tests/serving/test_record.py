"""What the scheduler's process records: real control and block pool, a clock moved by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from vllm.v1.core.block_pool import BlockPool

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.policy import FloorStage, Policy
from pagedweight.core.policy_file import save_policy
from pagedweight.errors import UserError
from pagedweight.runtime.controller import BlockDemand
from pagedweight.runtime.timeline import Timeline
from pagedweight.serving.elastic.budget import KVBlock, divide, fixed_bits, plan_context
from pagedweight.serving.elastic.control import Control
from pagedweight.serving.elastic.dealing import Parallel
from pagedweight.serving.elastic.metrics import Metrics
from pagedweight.serving.elastic.record import EVERY_SECONDS, Recorder, header_of, sinks_of
from pagedweight.serving.options import ServeOptions
from quantized import make_quantized

BLOCK = KVBlock(layers=3, layer_bytes=4096)
PAGE = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("record")
    make_quantized(path / "out")
    stages = (FloorStage("floor", (4,) * 13), FloorStage("emergency", (2,) * 13, emergency=True))
    policy = Policy(stages=stages, offload_blocks=2, reload_blocks=4, dwell_steps=3)
    save_policy(policy, path / "policy.json")
    return Checkpoint.open(path / "out")


def control_of(checkpoint, **options):
    policy = str(checkpoint.path.parent / "policy.json")
    given = ServeOptions(memory=700_000, page_bytes=PAGE, policy=policy, **options)
    context = plan_context(checkpoint, given, 1)
    budget = divide(context, given, BLOCK, fixed_bits(checkpoint, given))
    pool = BlockPool(budget.reachable_blocks, enable_caching=True, hash_block_size=16)
    return Control(checkpoint, given, BLOCK, pool, Parallel(), block_tokens=16)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Kept(list):
    """A sink that keeps samples."""

    def write(self, sample):
        self.append(sample)

    def flush(self):
        self.flushed = len(self)

    def close(self):
        self.closed = True


@pytest.fixture
def world(checkpoint):
    control, clock, kept = control_of(checkpoint), Clock(), Kept()
    control.recorder = Recorder(control, [kept], wall=clock, monotonic=clock)
    return control, clock, kept


def step(control, clock, seconds=0.004, tokens=0, used=0, pending=0, running=0, waiting=0):
    """One step `seconds` after the last. All blocks but `used` are free."""
    clock.now += seconds
    free = control.parking.free_blocks - used
    control.plan(BlockDemand(free, pending), running=running, waiting=waiting)
    control.scheduled(tokens)


def test_there_is_a_sample_before_the_first_request(world):
    control, _, kept = world
    (first,) = kept
    assert (first.step, first.running, first.kv_used) == (0, 0, 0)
    assert first.kv_usable == control.controller.granules.usable_blocks
    assert first.bits == control.controller.table.mean_bits()[2]
    assert first.kv_reachable == control.budgets[0].reachable_blocks - 1


def test_quiet_steps_are_one_sample_each_time_that_the_clock_allows(world):
    control, clock, kept = world
    for _ in range(20):
        step(control, clock, EVERY_SECONDS / 4 * 1.001, tokens=3, used=2, running=1)
    assert 5 <= len(kept) - 1 <= 6
    gaps = [b.monotonic - a.monotonic for a, b in pairwise(kept)]
    assert min(gaps) >= EVERY_SECONDS
    step(control, clock, 1.0, tokens=3, used=2, running=1)
    last = kept[-1]
    assert (last.tokens_scheduled, last.step, last.kv_used, last.running) == (63, 21, 2, 1)


def test_a_preemption_is_a_sample_at_once(world):
    control, clock, kept = world
    step(control, clock, 1.0)
    before = len(kept)
    step(control, clock, 0.0)
    assert len(kept) == before
    control.preemptions += 2
    step(control, clock, 0.0)
    assert len(kept) == before + 1
    assert kept[-1].preemptions == 2


def test_pressure_shows_its_plan_and_where_floors_leave_too_little(world):
    control, clock, kept = world
    step(control, clock, pending=control.controller.granules.usable_blocks, waiting=1)
    plan = kept[-1]
    assert plan.plan == "offload"
    assert plan.target_bytes > 0
    assert plan.plan_damage == plan.damage_taken > 0
    assert plan.waiting == 1
    assert plan.kv_demanded == control.controller.granules.usable_blocks
    assert plan.rows_waiting > 0
    assert plan.floor_hits == 0
    for _ in range(40):
        step(control, clock, pending=10_000, waiting=99)
    step(control, clock, 1.0, pending=10_000, waiting=99)
    assert kept[-1].floor_hits >= 1
    assert kept[-1].damage_taken == pytest.approx(sum(s.plan_damage for s in kept), rel=1e-6)


def test_falling_idle_is_a_sample_and_a_flush_once(world):
    control, clock, kept = world
    step(control, clock, 1.0, tokens=5, used=4, running=2)
    control.recorder.generated(2)
    before = len(kept)
    for _ in range(3):
        clock.now += 0.001
        control.recorder.idle(BlockDemand(control.parking.free_blocks), 0, 0)
    assert len(kept) == before + 1 == kept.flushed
    assert (kept[-1].running, kept[-1].kv_used, kept[-1].tokens_generated) == (0, 0, 2)


def test_damage_counts_from_all_bits(world):
    control, clock, kept = world
    table = control.controller.table
    step(control, clock, 1.0)
    top = table.sizes.planes
    if (table.committed_bits == top).all():
        assert kept[-1].damage == 0
    else:
        assert kept[-1].damage > 0
    table.committed_bits[:] = table.sizes.lowest
    step(control, clock, 1.0)
    lowest = kept[-1].damage
    sensitivity = control.context.calibration.sensitivity
    assert lowest == pytest.approx((sensitivity[..., 0] - sensitivity[..., -1]).sum(), rel=1e-5)


class Full(Kept):
    def write(self, sample):
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_recording_not_the_service(checkpoint, caplog):
    control, clock, kept = control_of(checkpoint), Clock(), Kept()
    with caplog.at_level("WARNING", logger="vllm.pagedweight"):
        control.recorder = Recorder(control, [Full(), kept], wall=clock, monotonic=clock)
        step(control, clock, 1.0)
    assert len(kept) == 2
    said = [record.getMessage() for record in caplog.records if "No space" in record.getMessage()]
    assert len(said) == 1


def test_static_precision_is_recorded_too(checkpoint, tmp_path):
    control = control_of(checkpoint, bits=4, timeline=str(tmp_path / "static.jsonl"))
    clock = Clock()
    step(control, clock, tokens=7, used=3, running=1)
    control.close()
    found = Timeline.load(tmp_path / "static.jsonl")
    assert found.header.precision == "static"
    assert set(found.column("bits")) == {4.0}
    assert found.samples[-1].tokens_scheduled == 7
    budget = found.header.budget
    held = budget.weights_at_start + budget.kv_at_start + budget.reserve
    assert found.samples[0].free_bytes == budget.total - held


def test_the_header_says_how_the_budget_is_divided(checkpoint, tmp_path):
    control = control_of(checkpoint, timeline=str(tmp_path / "a.jsonl"))
    header = Timeline.load(tmp_path / "a.jsonl").header
    budget = header.budget
    assert header.model == "out"
    assert header.block_tokens == 16
    assert header.block_bytes == BLOCK.nbytes
    assert (header.offload_blocks, header.reload_blocks, header.dwell_steps) == (2, 4, 3)
    assert header.reachable > header.usable_at_start
    assert budget.weights_at_floor < budget.weights_at_start
    assert budget.weights_at_start + budget.kv_at_start + budget.reserve <= budget.total
    assert budget.weights_at_floor + budget.kv_reachable + budget.reserve <= budget.total
    control.close()


def test_engines_of_one_server_write_a_file_each(checkpoint, tmp_path):
    header = replace(header_of(control_of(checkpoint), checkpoint, 16, 0, 0.0), engine=1)
    metrics, writer = sinks_of(header, str(tmp_path / "a.jsonl"))
    writer.close()
    assert isinstance(metrics, Metrics)
    assert Timeline.load(tmp_path / "a.1.jsonl").header.engine == 1
    with pytest.raises(UserError, match="there is no folder"):
        sinks_of(header, str(tmp_path / "none" / "a.jsonl"))
