"""PlanStep: triggers, stages, hysteresis, dwell, bytes on the way, and options that must act."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planner_world import SIMPLE, pressure, world

from pagedweight.core.observation import (
    BatchSignals,
    KVPressure,
    Observation,
    RequestSignals,
    merge_signals,
)
from pagedweight.core.page_table import PageState, WeightPageTable
from pagedweight.core.planner import Plan, PlanContext, Planner, PlanQueue, TableState, plan_step
from pagedweight.core.planner.queue import refresh_plan_queue, select_best_plan
from pagedweight.core.planner.score import predict_damage, routing_buckets
from pagedweight.core.policy import Bucket, FloorStage, Policy

RATIO_BUCKETS = (Bucket(0.0, 0.25), Bucket(0.5, 1.0), Bucket(2.0, 4.0))
STAGES = (
    FloorStage("protect", (3, 3, 5)),
    FloorStage("floor", (3, 3, 3)),
    FloorStage("emergency", (2, 2, 2), emergency=True),
)
STAGED = replace(SIMPLE, buckets=RATIO_BUCKETS, stages=STAGES)


def table_of(context: PlanContext, bits: int = 6) -> WeightPageTable:
    return WeightPageTable(context.index, context.sizes, bits)


def settle(table: WeightPageTable) -> None:
    """Carry out what d asks for, at once."""
    rows = np.arange(table.rows)
    down = rows[table.desired_bits < table.committed_bits]
    table.lower(down, table.begin_lower(down, table.desired_bits[down]))
    up = rows[table.desired_bits > table.committed_bits]
    table.finish_reload(up, table.begin_reload(up, table.desired_bits[up]))
    table.raise_bits(up, table.desired_bits[up])
    leaving = rows[table.can_retire(rows)]
    table.finish_retire(leaving, table.begin_retire(leaving))
    table.check_integrity()
    assert table.settled().all()


def hot(context: PlanContext, expert: int, share: float = 0.9) -> BatchSignals:
    """Signals of a batch that sends `share` of every layer's mass to one expert."""
    layers, experts, _ = context.index.shape
    mass = np.full((layers, experts), (1 - share) / (experts - 1))
    mass[:, expert] = share
    return BatchSignals(mass)


def step(
    context: PlanContext, table: WeightPageTable, kv: KVPressure, at: int = 0, **more: object
) -> Plan:
    return Planner(context).step(table, Observation(at, kv, **more))  # type: ignore[arg-type]


def test_no_pressure_no_plan() -> None:
    context = world()
    plan = step(context, table_of(context), pressure(5))
    assert plan.kind == "none"


def test_pressure_gives_an_offload_of_at_least_the_target() -> None:
    context = world()
    table = table_of(context)
    before = table.bytes_in(PageState.DEVICE)
    plan = step(context, table, pressure(0, pending=10))
    assert plan.kind == "offload"
    assert plan.target_bytes == 15 * 4096 <= plan.returned_bytes
    assert (plan.to_bits >= 3).all()
    plan.apply(table)
    settle(table)
    assert before - table.bytes_in(PageState.DEVICE) == plan.returned_bytes == plan.delta.sum()


def test_equal_inputs_give_equal_plans_with_or_without_kept_scores() -> None:
    context = world(heads=True, policy=replace(SIMPLE, prior_tokens=10.0))
    state = TableState.of(table_of(context))
    features = np.full((*context.index.shape, 3), 5, np.float32)
    request = RequestSignals(2, 50.0, np.full((2, 4), 3, np.float32), features)
    signals = merge_signals([request], context.calibration, 10.0)
    seen = Observation(3, pressure(0, pending=20), signals)
    kept, first = plan_step(state, seen, context, PlanQueue())
    again, second = plan_step(state, seen, context, kept)
    _, fresh = plan_step(state, replace(seen, signals=replace(signals)), context, PlanQueue())
    assert again.damage is kept.damage
    for plan in (second, fresh):
        assert plan.rows.tolist() == first.rows.tolist()
        assert plan.to_bits.tolist() == first.to_bits.tolist()
        assert plan.damage == first.damage


def test_bytes_of_an_unfinished_plan_are_not_asked_for_again() -> None:
    context = world()
    table = table_of(context)
    planner = Planner(context)
    planner.step(table, Observation(0, pressure(0, pending=10))).apply(table)
    assert planner.step(table, Observation(1, pressure(0, pending=10))).kind == "none"
    more = planner.step(table, Observation(2, pressure(0, pending=14)))
    assert more.kind == "offload"
    assert more.target_bytes <= 4 * 4096


def test_pages_per_step_cap_spreads_an_offload_over_steps() -> None:
    context = world(policy=replace(SIMPLE, offload_pages_per_step=5))
    table, planner = table_of(context), Planner(context)
    seen = pressure(0, pending=20)
    total = 0
    for at in range(50):
        plan = planner.step(table, Observation(at, seen))
        if plan.kind == "none":
            break
        assert plan.pages <= 5
        total += plan.returned_bytes
        plan.apply(table)
    assert total >= 25 * 4096
    assert at > 2


def test_reload_waits_for_the_dwell_and_goes_best_first() -> None:
    context = world()
    table, planner = table_of(context), Planner(context)
    planner.step(table, Observation(10, pressure(0, pending=60))).apply(table)
    settle(table)
    idle = pressure(500)
    for at in range(11, 10 + SIMPLE.dwell_steps):
        assert planner.step(table, Observation(at, idle)).kind == "none"
    plan = planner.step(table, Observation(10 + SIMPLE.dwell_steps, idle))
    assert plan.kind == "reload"
    assert plan.damage < 0
    plan.apply(table)
    settle(table)
    assert (table.committed_bits == 6).all()


def test_reload_stays_within_the_bytes_to_spare() -> None:
    context = world()
    table = table_of(context, 3)
    spare = 10 * 4096
    plan = step(context, table, pressure(SIMPLE.reload_blocks + 1 + 10))
    assert plan.kind == "reload"
    assert 0 < -plan.returned_bytes <= spare
    assert step(context, table, pressure(SIMPLE.reload_blocks)).kind == "none"
    tight = step(context, table, pressure(SIMPLE.reload_blocks + 1, headroom_bytes=4 * 4096))
    assert 0 < -tight.returned_bytes <= 4 * 4096


@pytest.mark.parametrize("page_bytes, granule", [(1, 1), (4096, 1), (32768, 16)])
@pytest.mark.parametrize("bits", [6, 3])
@pytest.mark.parametrize("load", range(0, 140, 26))
def test_a_constant_load_does_not_oscillate(
    page_bytes: int, granule: int, bits: int, load: int
) -> None:
    """A pool of weights and KV: after a while d stays where it is, whatever the load."""
    context = world(page_bytes=page_bytes)
    table, planner = table_of(context, bits), Planner(context)
    pool = context.pages.held_by(table_of(context).slots()) + 40 * 4096
    backed = (pool - context.pages.held_by(table.slots())) // (granule * 4096) * granule
    changes: list[tuple[int, str]] = []
    for at in range(80):
        held = context.pages.held_by(table.slots())
        free_bytes = pool - held - backed * 4096
        while free_bytes >= granule * 4096 and backed - load <= SIMPLE.reload_blocks:
            backed += granule
            free_bytes -= granule * 4096
        running = min(load, backed)
        kv = pressure(
            backed - running,
            usable=backed,
            pending=load - running,
            granule_blocks=granule,
            headroom_bytes=max(free_bytes, 0),
        )
        plan = planner.step(table, Observation(at, kv))
        if plan.kind == "reload":
            needed = -plan.returned_bytes - free_bytes
            backed -= max(0, -(-needed // (granule * 4096))) * granule
        if plan.kind != "none":
            changes.append((at, plan.kind))
        plan.apply(table)
        settle(table)
        assert context.pages.held_by(table.slots()) + backed * 4096 <= pool
    kinds = {kind for _, kind in changes}
    assert kinds <= ({"offload"} if bits == 6 else {"reload"})
    assert not changes or changes[-1][0] < 40
    needed = load + SIMPLE.reload_blocks + 1 + granule
    if bits == 3 and needed < 40:
        assert table.committed_bits.min() > 3
    if bits == 6 and load > 40:
        assert table.committed_bits.min() < 6


def test_protective_stage_first_then_looser_ones() -> None:
    context = world(policy=STAGED)
    table = table_of(context)
    signals = hot(context, expert=2)
    hot_rows = [context.index.row(lay, 2, kind) for lay in range(2) for kind in range(2)]
    small = step(context, table, pressure(0, pending=20), signals=signals)
    assert small.stage == "protect"
    most = int(context.sizes.total(table.committed_bits)) - int(
        context.sizes.total(np.full(16, 3, np.int32))
    )
    large = step(context, table, pressure(0, pending=most // 4096 - 6), signals=signals)
    assert large.stage == "floor"
    bits = table.desired_bits.copy()
    bits[large.rows] = large.to_bits
    assert (bits[hot_rows] < 5).any()
    protected = table.desired_bits.copy()
    protected[small.rows] = small.to_bits
    assert (protected[hot_rows] >= 5).all()


def test_emergency_level_only_where_something_would_be_preempted_or_stuck() -> None:
    context = world(policy=STAGED)
    table = table_of(context)
    reach = context.sizes.total(table.committed_bits) - context.sizes.total(
        np.full(16, 3, np.int32)
    )
    blocks = reach // 4096
    waiting = step(context, table, pressure(0, pending=2 * blocks, head_blocks=blocks // 2))
    assert waiting.to_bits.min() == 3
    assert not waiting.satisfied
    stuck = step(context, table, pressure(0, pending=2 * blocks, head_blocks=blocks + 5))
    assert stuck.stage == "emergency"
    assert stuck.satisfied
    assert stuck.to_bits.min() == 2
    never = replace(STAGED, allow_emergency=False)
    refused = step(
        world(policy=never), table, pressure(0, pending=2 * blocks, head_blocks=blocks + 5)
    )
    assert refused.to_bits.min() == 3


def test_queue_keeps_the_newest_plan_of_a_stage() -> None:
    def plan(stage: str, target: int, returned: int, damage: float = 0.0) -> Plan:
        return replace(
            Plan.none(stage, target), kind="offload", stage_bytes=returned, damage=damage
        )

    queue = refresh_plan_queue(PlanQueue(), plan("protect", 100, 50))
    queue = refresh_plan_queue(queue, plan("floor", 100, 80))
    assert select_best_plan(queue).stage == "floor"  # neither meets the target: the larger one
    queue = refresh_plan_queue(queue, plan("protect", 100, 100, damage=9.0))
    assert [kept.stage for kept in queue.plans] == ["protect", "floor"]
    assert select_best_plan(queue).stage == "protect"
    queue = refresh_plan_queue(queue, plan("protect", 100, 50))
    lesser = refresh_plan_queue(queue, plan("emergency", 70, 75), emergency=True)
    assert select_best_plan(lesser).stage == "floor"  # 80 bytes are enough for the emergency
    needed = refresh_plan_queue(queue, plan("emergency", 90, 95), emergency=True)
    assert select_best_plan(needed).stage == "emergency"


def test_multipliers_are_relative_to_calibration_mass() -> None:
    """An expert that is always hot is not protected twice; one hotter than usual is."""
    context = world(policy=STAGED)
    usual = BatchSignals(context.calibration.mass)
    multiplier, bucket = routing_buckets(context, usual)
    assert (multiplier == 1.0).all()
    assert (bucket == 1).all()
    mass = context.calibration.mass.copy()
    mass[0, 1] *= 3.0
    mass[1, 2] /= 4.0
    multiplier, bucket = routing_buckets(context, BatchSignals(mass))
    table = multiplier.reshape(2, 4, 2)
    assert (table[0, 1] == 4.0).all()
    assert (table[1, 2] == 0.25).all()
    assert (np.delete(table.reshape(8, 2), [1, 6], axis=0) == 1.0).all()
    assert bucket.reshape(2, 4, 2)[0, 1].tolist() == [2, 2]


def test_damage_is_equation_8() -> None:
    context = world(policy=replace(STAGED, epsilon=0.5), heads=True)
    signals = replace(hot(context, 1), rho=np.full((4, 16), 0.3, np.float32))
    heads = context.calibration.heads
    assert heads is not None
    signals = replace(signals, confidence=heads.confidence, clip=heads.clip)
    found = predict_damage(context, signals).predicted * context.damage_unit
    s = context.calibration.sensitivity
    ratio = signals.mass / context.calibration.mass
    for row in range(16):
        layer, expert, kind = context.index.block(row)
        mu = 0.25 if ratio[layer, expert] < 0.5 else 1.0 if ratio[layer, expert] < 2 else 4.0
        for t in range(4):
            g = max(s[layer, expert, kind, t] - s[layer, expert, kind, t + 1], 0.0)
            eta = np.exp(float(heads.confidence[kind, t]) * 0.3)
            floor = 0.5 * context.damage_unit
            np.testing.assert_allclose(found[t, row], max(floor, mu * g * eta), rtol=1e-5)


def plans_of(policy: Policy, heads: bool = True) -> list[tuple[list[int], list[int]]]:
    """Plans of one loaded step after another, with signals that differ from calibration."""
    context = world(4, policy, heads=heads)
    table, planner, out = table_of(context), Planner(context), []
    rng = np.random.default_rng(0)
    features = rng.lognormal(3, 2, (2, 4, 2, 3)).astype(np.float32)
    request = RequestSignals(4, 80.0, rng.lognormal(0, 2, (2, 4)).astype(np.float32), features)
    signals = merge_signals([request], context.calibration)
    for at, pending in enumerate((20, 50)):
        plan = planner.step(table, Observation(at, pressure(0, pending), signals))
        plan.apply(table)
        out.append((plan.rows.tolist(), plan.to_bits.tolist()))
    return out


@pytest.mark.parametrize(
    "switch", ["use_routing", "use_residual", "use_movement", "use_sensitivity"]
)
def test_no_ablation_switch_is_inert(switch: str) -> None:
    assert plans_of(replace(STAGED, **{switch: False})) != plans_of(STAGED)


def test_without_movement_nothing_ever_moves() -> None:
    assert plans_of(replace(STAGED, use_movement=False)) == [([], []), ([], [])]


def test_without_sensitivity_bits_fall_level_by_level() -> None:
    context = world(policy=replace(SIMPLE, use_sensitivity=False))
    table, planner = table_of(context), Planner(context)
    for at in range(30):
        plan = planner.step(table, Observation(at, pressure(0, pending=4 * at)))
        plan.apply(table)
        assert int(table.desired_bits.max()) - int(table.desired_bits.min()) <= 1
    assert table.desired_bits.max() < 6


@pytest.mark.parametrize(
    "change",
    [
        {"alpha": 0.0},
        {"epsilon": 0.9},
        {"buckets": (Bucket(0.0, 1.0), Bucket(0.5, 1.0), Bucket(2.0, 1.0))},
    ],
)
def test_no_weight_of_the_score_is_inert(change: dict[str, object]) -> None:
    assert plans_of(replace(STAGED, **change)) != plans_of(STAGED)  # type: ignore[arg-type]


def test_one_stored_level_never_plans() -> None:
    context = world(levels=(4,))
    assert step(context, table_of(context, 4), pressure(0, pending=50)).kind == "none"
