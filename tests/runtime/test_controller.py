"""Scheduler and ranks together: precision gives way to a burst and returns, on all ranks alike."""

import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from engines import POLICY, Blocks, Engine
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.memory.fake import fail_at
from pagedweight.runtime.controller import PATIENT_STEPS, BlockDemand
from pagedweight.runtime.granules import GranuleLedger, GranuleState
from pagedweight.runtime.integrity import check_worker
from pagedweight.runtime.messages import (
    BatchStatus,
    RankPages,
    Stage,
    StepPlan,
    WorkerReport,
    check_version,
    granules_of,
    mask_of,
    merged,
)

BURST = [*range(0, 40, 2), *[40] * 25]


def run(engine, load):
    return [engine.step(wanted) for wanted in load]


GPU = {"eager": True, "pages_per_step": 7}


@pytest.mark.parametrize(
    "ranks, lag, config", [(1, 0, {}), (1, 2, {}), (2, 2, {}), (1, 2, GPU)], ids=str
)
def test_a_burst_lowers_bits_and_grows_kv_and_both_return(ranks, lag, config):
    engine = Engine(ranks, lag, **config)
    start = engine.controller.granules.usable_blocks
    run(engine, BURST)
    status = engine.controller.status
    assert engine.controller.granules.usable_blocks > 41
    assert len(engine.blocks.used) == 41, "everybody got what they wanted"
    assert status.mean_bits[2] < 5
    assert engine.bits()[0] == engine.bits()[-1]
    engine.idle()
    assert engine.bits() == [[6] * 16] * ranks
    assert start - 2 <= engine.controller.granules.usable_blocks <= start
    for rank in engine.ranks:
        check_worker(rank.worker, contents=True)
        assert rank.worker.counters.rows_lowered >= 16


def test_an_eager_rank_lowers_without_waiting_to_be_told():
    steps = []
    for eager in (False, True):
        engine = Engine(lag=1, lazy=False, eager=eager)
        start = engine.controller.granules.usable_blocks
        count = 0
        while engine.controller.granules.usable_blocks <= start:
            engine.step(40)
            count += 1
        steps.append(count)
    assert steps[1] <= steps[0] - 2


def test_no_more_pages_change_hands_in_a_step_than_allowed():
    engine = Engine(lag=1, pages_per_step=7)
    worker = engine.ranks[0].worker
    pool, most = worker.mover.weights.pool, max(7, worker.kv.most_pages)
    back, taken = [], []
    for wanted in BURST:
        before, held = worker.counters.reclaimed_pages, pool.held_by("kv")
        engine.step(wanted)
        back.append(worker.counters.reclaimed_pages - before)
        taken.append(pool.held_by("kv") - held)
    assert max(back) == 7
    assert 0 < max(taken) <= most
    assert sum(back) > 20


def test_ranks_change_the_same_rows_at_the_same_step():
    engine = Engine(ranks=2, lag=1)
    for wanted in BURST:
        before = engine.bits()
        engine.step(wanted)
        assert engine.bits()[0] == engine.bits()[1], (before, wanted)


def test_the_same_loads_give_the_same_plans():
    plans = [run(Engine(ranks=2, lag=2), BURST) for _ in range(2)]
    assert plans[0] == plans[1]
    assert any(plan.commit for plan in plans[0])


def test_lowering_at_once_takes_one_step():
    engine = Engine(lag=0, lazy=False, at_once=True)
    run(engine, [19, 30])
    assert engine.ranks[0].worker.counters.rows_lowered > 0
    assert engine.controller.status.plan_kind == "offload"
    engine.step(30)
    assert engine.controller.granules.usable_blocks > 23


@pytest.mark.parametrize("name", ["map", "upload", "write", "fill"])
def test_a_rank_that_refuses_aborts_the_batch_on_all(name):
    engine = Engine(ranks=2, lag=1)
    failing = engine.devices[1]
    failing.fault = lambda number, call: call == name
    run(engine, BURST[:30])
    calls = [call for call, *_ in failing.calls]
    assert calls.count(name) > 1
    assert engine.ranks[1].worker.counters.rolled_back > 0
    if name == "upload":
        assert engine.bits() == [[6] * 16] * 2
        assert engine.controller.status.failures > 0
        assert engine.ranks[0].worker.counters.rows_lowered == 0
    failing.fault = fail_at()
    run(engine, [40] * 40)
    assert engine.bits()[0] == engine.bits()[1]
    assert engine.controller.granules.usable_blocks > 41, "after that it goes on as usual"
    engine.idle()
    assert engine.bits() == [[6] * 16] * 2


def test_what_another_rank_counted_is_not_forgotten_when_one_reports_alone():
    engine = Engine(ranks=2, lag=1)
    engine.devices[1].fault = lambda number, call: call == "upload"
    run(engine, BURST[:30])
    counted = engine.controller.counters["rolled_back"]
    alone = engine.ranks[0].worker.report()
    assert counted > alone.counters["rolled_back"] == 0
    engine.controller.hear(alone, engine.blocks)
    assert engine.controller.counters["rolled_back"] == counted


def test_a_refused_batch_is_tried_again_later_and_smaller():
    engine = Engine()
    engine.devices[0].fault = lambda number, call: call == "upload"
    plans = run(engine, [40] * 30)
    sizes = [[len(batch.rows) for batch in plan.prepare] for plan in plans]
    tries = [(step, size) for step, size in enumerate(sizes) if size]
    assert max(tries[0][1]) > max(tries[-1][1]) == 1
    assert all(later - step >= 3 for (step, _), (later, _) in pairwise(tries))


def test_an_idle_engine_whose_memory_is_refused_falls_asleep_and_tries_again_later():
    engine = Engine()
    engine.idle()
    device, granules = engine.devices[0], engine.controller.granules
    start = granules.usable_blocks
    granules.give_back(3, engine.blocks, engine.controller.step_number)
    device.fault = lambda number, call: call == "map"
    run(engine, [0] * 8)
    low = granules.usable_blocks
    assert low < start
    assert 0 < engine.idle() < 2 * PATIENT_STEPS
    refused = engine.ranks[0].worker.counters.rolled_back
    assert refused >= PATIENT_STEPS - 2
    run(engine, [0] * 4 * PATIENT_STEPS)
    assert engine.ranks[0].worker.counters.rolled_back == refused, "nobody asks for a while"
    device.fault = fail_at()
    run(engine, [0] * 5 * PATIENT_STEPS)
    assert granules.usable_blocks > low
    engine.idle()


def test_pressure_stops_a_reload_that_is_under_way():
    engine = Engine(lag=1)
    run(engine, BURST)
    device = engine.devices[0]
    device.run_uploads = lambda count=None: None
    raising = []
    for _ in range(30):
        plan = engine.step(0)
        raising += [batch.number for batch in plan.prepare if not batch.lowers]
    assert raising
    plans = run(engine, [46] * 10)
    assert {n for plan in plans for n in plan.abort} & set(raising)
    del device.run_uploads
    run(engine, [40] * 30)
    assert engine.ranks[0].worker.counters.stale_copies > 0
    assert len(engine.blocks.used) == 41
    engine.idle()
    assert engine.bits() == [[6] * 16]


def test_blocks_scattered_over_all_granules_keep_bits_low_and_the_engine_asleep():
    engine = Engine()
    run(engine, BURST)
    engine.blocks.used = {0, *range(2, 46, 2)}
    for _ in range(40):
        engine.hear()
        demand = BlockDemand(len(engine.blocks.free()))
        if not engine.controller.wants_step(demand):
            break
        for rank in engine.ranks:
            rank.worker.apply(plan := engine.controller.step(demand, engine.blocks))
            engine.reports.append(rank.worker.report())
        assert not plan.shrink
        engine.devices[0].run()
        engine.devices[0].run_uploads()
    else:
        raise AssertionError("it never goes to sleep")
    engine.idle()
    assert engine.bits() == [[6] * 16]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 47), st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(1, 2),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.booleans(),
    st.sampled_from([None, 1, 7]),
)
def test_any_load_with_refusals_stays_sound_and_everything_returns(
    loads, ranks, lag, rate, lazy, pages_per_step
):
    """`Engine.check` holds after every step; without load all bits come back."""
    eager = ranks == 1 and pages_per_step is not None
    engine = Engine(ranks, lag, lazy=lazy, pages_per_step=pages_per_step, eager=eager)
    rng = np.random.default_rng(0)
    for device in engine.devices:
        device.fault = device.upload_fault = lambda number, name: rng.random() < rate
    for wanted, steps in loads:
        run(engine, [wanted] * steps)
    for device in engine.devices:
        device.fault = device.upload_fault = fail_at()
    engine.idle()
    assert engine.bits() == [[6] * 16] * ranks
    for rank in engine.ranks:
        check_worker(rank.worker, contents=True)


def test_without_movement_nothing_ever_moves():
    engine = Engine()
    planner = engine.controller._planner
    planner.context = replace(planner.context, policy=replace(POLICY, use_movement=False))
    run(engine, BURST)
    assert engine.bits() == [[6] * 16]
    assert engine.controller.granules.usable_blocks == 23


# -- messages and granules -----------------------------------------------------------------------


def test_messages_are_small_and_of_one_version():
    engine = Engine(ranks=1)
    plans = run(engine, BURST)
    largest = max(plans, key=lambda plan: len(plan.prepare))
    assert len(pickle.dumps(largest)) < 1000
    assert pickle.loads(pickle.dumps(largest)) == largest
    with pytest.raises(ValueError, match="StepPlan of version 9, this process speaks 3"):
        check_version(replace(largest, version=9))


def test_what_all_ranks_agree_on():
    one = WorkerReport(
        7,
        (BatchStatus(1, Stage.DONE), BatchStatus(2, Stage.READY), BatchStatus(3, Stage.COPYING)),
        mask_of([0, 1, 2]),
        (RankPages(0, 10, returning=3),),
        {"rolled_back": 1},
    )
    two = WorkerReport(
        7,
        (
            BatchStatus(1, Stage.COMMITTED),
            BatchStatus(2, Stage.FAILED, "map"),
        ),
        mask_of([0, 2, 3]),
        (RankPages(1, 8),),
        {"rolled_back": 4},
    )
    both = merged([one, two])
    assert both.batches == (BatchStatus(1, Stage.COMMITTED), BatchStatus(2, Stage.FAILED, "map"))
    assert granules_of(both.backed) == [0, 2]
    assert both.pages == (RankPages(0, 10, returning=3), RankPages(1, 8))
    assert both.counters["rolled_back"] == 4


def test_an_old_report_neither_unparks_nor_parks():
    """A granule given back at step 5 and wished for again at 8 is backed in reports of step 4."""
    blocks = Blocks(8, 2, {0, 1, 2})
    ledger = GranuleLedger(8, 2, {0, 1, 2})
    assert ledger.give_back(1, blocks, step=5) == 1
    ledger.hear(WorkerReport(4, backed=0b111), blocks)
    assert ledger.states[2] == GranuleState.SHRINKING
    ledger.hear(WorkerReport(5, backed=0b011), blocks)
    assert ledger.wish(1, step=8) == (2,)
    ledger.hear(WorkerReport(7, backed=0b111), blocks)
    assert blocks.parked == {2, 3}
    ledger.hear(WorkerReport(8, backed=0b111), blocks)
    assert blocks.parked == {3}
    assert ledger.usable_blocks == 5


def test_granule_zero_with_the_null_block_is_never_given_back():
    blocks = Blocks(8, 2, {0, 1})
    ledger = GranuleLedger(8, 2, {0, 1})
    blocks.used = set()
    assert ledger.give_back(4, blocks, step=1) == 1
    assert ledger.having(GranuleState.USABLE) == [0]
    assert ledger.usable_blocks == 1


def test_an_empty_plan_is_understood_by_a_rank_without_kv():
    engine = Engine()
    engine.ranks[0].worker.kv = None
    engine.ranks[0].worker.apply(StepPlan(1, grow=(1,), shrink=(2,)))
    assert engine.ranks[0].worker.report().backed == 0


def test_a_lowering_needs_no_more_than_the_reserve_when_nothing_else_is_free():
    """Its tables come in first: a batch that is too large for that would fail and be tried again
    smaller and later, while requests are preempted."""
    engine = Engine(lazy=False, at_once=True, reserve=4, lowering_pages=4, rows_per_batch=16)
    rank = engine.ranks[0].worker
    assert rank.report().pages[0].free < 6, "KV took what fits at start"
    run(engine, [40])
    assert engine.bits()[0] == engine.controller.table.desired_bits.tolist()
    assert sum(engine.bits()[0]) < 6 * 16
    assert rank.counters.rolled_back == rank.counters.aborted_batches == 0
    assert not any(s.stage is Stage.FAILED for s in rank.mover.statuses())
