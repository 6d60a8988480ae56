"""GreedySelect and restore: equal to the plain version, near the optimum, within every limit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import (
    ONE_BUCKET,
    SIMPLE,
    held,
    plain_offload,
    plain_restore,
    rows_at,
    world,
)

from pagedweight.core.planner.context import PlanContext
from pagedweight.core.planner.greedy import first_steps, greedy_select
from pagedweight.core.planner.plan import Plan
from pagedweight.core.planner.restore import restore_plan
from pagedweight.core.planner.score import (
    Damage,
    Rows,
    offload_order,
    predict_damage,
    score_actions,
)
from pagedweight.core.planner.stages import Stage
from pagedweight.core.policy import FloorStage

QUICK = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 10_000)
pages = st.sampled_from([1, 4096, 32768])


def stage_at(context: PlanContext, level: int, cap: int | None = None) -> Stage:
    floors = np.full(len(context.policy.buckets), level, np.int8)
    return Stage("test", floors, cap, emergency=False)


def after_of(context: PlanContext, rows: Rows, plan: Plan) -> np.ndarray:
    after = rows.now.copy()
    after[plan.rows] = context.levels_of(plan.to_bits)
    return after


def select(context: PlanContext, rows: Rows, stage: Stage, target: int) -> Plan:
    order = offload_order(rows.damage, rows.now)
    return greedy_select(context, score_actions(rows, order, stage), target)


@QUICK
@given(seeds, pages, st.booleans(), st.floats(0.01, 1.2), st.booleans())
def test_offload_equals_the_plain_version(
    seed: int, page: int, convex: bool, share: float, ties: bool
) -> None:
    context = world(seed, page_bytes=page, convex=convex)
    damage = predict_damage(context, None)
    if ties:
        damage = coarse(damage)
    now = np.random.default_rng(seed).integers(0, 5, context.index.rows).astype(np.int8)
    rows = rows_at(context, now, damage)
    floor = np.minimum(now, 1)
    target = int(share * (held(context, now) - held(context, floor)))
    plan = select(context, rows, stage_at(context, 1), target)
    expected = plain_offload(context, damage, now, floor, target) if target > 0 else now
    assert after_of(context, rows, plan).tolist() == expected.tolist()
    assert plan.returned_bytes == held(context, now) - held(context, expected)
    assert plan.delta.sum() == context.sizes.total(context.bits_of(now)) - context.sizes.total(
        context.bits_of(expected)
    )


def coarse(damage: Damage) -> Damage:
    """Damage per byte rounded to powers of two, so that most steps tie with others."""
    per_byte = np.exp2(np.round(np.log2(damage.per_byte))).astype(np.float32)
    return replace(damage, per_byte=per_byte, order=None)


@QUICK
@given(seeds, pages, st.booleans(), st.floats(0.0, 1.2), st.integers(1, 40))
def test_restore_equals_the_plain_version(
    seed: int, page: int, convex: bool, share: float, cap: int
) -> None:
    policy = replace(SIMPLE, reload_pages_per_step=cap)
    context = world(seed, policy, page_bytes=page, convex=convex)
    now = np.random.default_rng(seed).integers(0, 5, context.index.rows).astype(np.int8)
    rows = rows_at(context, now)
    spare = int(share * (held(context, np.full_like(now, 4)) - held(context, now)))
    plan = restore_plan(context, rows, spare)
    expected = plain_restore(context, rows.damage, now, spare, cap) if spare > 0 else now
    assert after_of(context, rows, plan).tolist() == expected.tolist()
    assert -plan.returned_bytes == held(context, expected) - held(context, now) <= max(spare, 0)
    assert plan.pages <= cap


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0.05, 1.0))
def test_greedy_is_within_one_step_of_the_optimum(seed: int, share: float) -> None:
    context = world(seed, layers=1, levels=(3, 4, 5))
    rows = rows_at(context, np.full(8, 2))
    stage = stage_at(context, 0)
    all_bytes = held(context, rows.now) - held(context, np.zeros(8, np.int8))
    target = max(1, int(share * all_bytes))
    plan = select(context, rows, stage, target)
    predicted = rows.damage.predicted.astype(np.float64)
    to_level = np.vstack([np.cumsum(predicted[::-1], axis=0)[::-1], np.zeros(8)])
    size = context.sizes.resident
    best = np.inf
    for levels in itertools.product(range(3), repeat=8):
        released = sum(int(size[r % 2, 2] - size[r % 2, lv]) for r, lv in enumerate(levels))
        if released >= target:
            best = min(best, sum(to_level[lv, r] for r, lv in enumerate(levels)))
    found = plan.damage / context.damage_unit
    assert best <= found * (1 + 1e-6)
    assert found <= best + predicted.max()


@QUICK
@given(seeds, st.booleans())
def test_nothing_is_left_that_could_be_undone(seed: int, convex: bool) -> None:
    context = world(seed, convex=convex, page_bytes=4096)
    rows = rows_at(context, np.full(context.index.rows, 4))
    target = held(context, rows.now) // 5
    plan = select(context, rows, stage_at(context, 1), target)
    after = after_of(context, rows, plan)
    cheapest = {}
    for row in plan.rows.tolist():
        trial = after.copy()
        trial[row] += 1
        cheapest[row] = held(context, rows.now) - held(context, trial)
    assert plan.satisfied
    assert max(cheapest.values()) < target


@QUICK
@given(seeds, st.lists(st.integers(1, 400_000), min_size=2, max_size=6), st.booleans())
def test_a_larger_target_never_returns_less(seed: int, targets: list[int], convex: bool) -> None:
    context = world(seed, convex=convex)
    rows = rows_at(context, np.full(context.index.rows, 4))
    stage = stage_at(context, 1)
    returned = [select(context, rows, stage, t).returned_bytes for t in sorted(targets)]
    assert returned == sorted(returned)


def test_unreachable_target_gets_the_largest_safe_reduction() -> None:
    context = world(3)
    rows = rows_at(context, np.full(context.index.rows, 4))
    plan = select(context, rows, stage_at(context, 1), 10**9)
    assert not plan.satisfied
    assert (after_of(context, rows, plan) == 1).all()
    assert plan.returned_bytes == held(context, rows.now) - held(context, np.full(16, 1))


def test_nothing_to_do_is_the_empty_plan() -> None:
    context = world(3)
    at_floor = rows_at(context, np.full(context.index.rows, 1))
    plan = select(context, at_floor, stage_at(context, 1), 1000)
    assert (plan.kind, plan.rows.size, plan.returned_bytes) == ("none", 0, 0)
    assert not plan.satisfied
    assert select(context, at_floor, stage_at(context, 0), 0).kind == "none"


@QUICK
@given(seeds, st.floats(0.05, 1.1), st.integers(1, 4))
def test_floors_by_bucket_and_depth_caps_hold(seed: int, share: float, cap: int) -> None:
    context = world(seed)
    rng = np.random.default_rng(seed)
    bucket = np.repeat(rng.integers(0, 3, context.index.rows // 2), 2)
    damage = replace(predict_damage(context, None), bucket=bucket)
    rows = rows_at(context, np.full(context.index.rows, 4), damage)
    stage = Stage("test", np.array([0, 1, 2], np.int8), cap, emergency=False)
    floor = stage.floors[bucket]
    reach = held(context, rows.now) - held(context, floor)
    target = int(share * reach)
    plan = select(context, rows, stage, target)
    after = after_of(context, rows, plan)
    assert (after >= floor).all()
    deepest = int(4 - after.min())
    if deepest > cap:  # relaxed, so one level less could not provide the bytes
        tighter = np.maximum(floor, 4 - (deepest - 1))
        assert held(context, rows.now) - held(context, tighter) < target
    assert plan.satisfied == (target <= reach)


@QUICK
@given(seeds, pages, st.floats(0.05, 1.5), st.integers(1, 3))
def test_least_bytes_stay_but_for_the_last_step(
    seed: int, page: int, share: float, least: int
) -> None:
    """Single rows go below the level; all together stop where its bytes are."""
    context = world(seed, page_bytes=page)
    rows = rows_at(context, np.full(context.index.rows, 4))
    kept = held(context, np.full(context.index.rows, least))
    target = int(share * (held(context, rows.now) - kept))
    free = stage_at(context, 0)
    plan = select(context, rows, replace(free, least=least), target)
    given = min(target, held(context, rows.now) - kept)
    same = select(context, rows, free, given)
    assert (after_of(context, rows, plan) == after_of(context, rows, same)).all()
    assert plan.target_bytes == target
    assert plan.satisfied == (target == given)
    if target > given:
        assert plan.stage_bytes == given


def test_nothing_is_given_below_the_least_bytes() -> None:
    context = world(3)
    rows = rows_at(context, np.full(context.index.rows, 1))
    plan = select(context, rows, replace(stage_at(context, 0), least=1), 1000)
    assert (plan.kind, plan.stage_bytes, plan.target_bytes) == ("none", 0, 1000)


def test_depth_caps_count_from_resting_bits() -> None:
    resting = np.full(16, 5, np.int32)
    resting[:8] = 4
    context = world(1, resting_bits=resting)
    rows = rows_at(context, context.levels_of(resting))
    stage = stage_at(context, 0, cap=1)
    capped = np.array([1] * 8 + [2] * 8)
    target = held(context, rows.now) - held(context, capped)
    assert after_of(context, rows, select(context, rows, stage, target)).tolist() == [
        *capped.tolist()
    ]


def test_pages_per_step_cap_keeps_the_first_of_the_order() -> None:
    context = world(5)
    rows = rows_at(context, np.full(context.index.rows, 4))
    whole = select(context, rows, stage_at(context, 1), 10**9)
    for cap in (1, 7, 20, whole.pages):
        order = offload_order(rows.damage, rows.now)
        after = first_steps(context, order, rows.now, after_of(context, rows, whole), cap)
        assert int((rows.now - after).sum()) == cap
        taken = context.between(after, rows.now)
        left = context.between(np.full(16, 1, np.int8), after)
        if left.any():
            assert rows.damage.per_byte[taken].max() <= rows.damage.per_byte[left].min()


def test_rows_below_a_floor_stay_where_they_are() -> None:
    context = world(2)
    now = np.array([0, 1, 2, 3] * 4)
    rows = rows_at(context, now)
    plan = select(context, rows, stage_at(context, 2), 10**9)
    assert after_of(context, rows, plan).tolist() == np.minimum(now, 2).tolist()


@pytest.mark.parametrize(
    "levels, floors",
    [((2, 3, 4, 5, 6), [1, 0]), ((3, 4, 5, 6), [0]), ((4, 5), [0]), ((2,), [0])],
)
def test_stages_fit_the_levels_that_are_stored(levels: tuple[int, ...], floors: list[int]) -> None:
    stages = (FloorStage("floor", (3,)), FloorStage("emergency", (2,), emergency=True))
    policy = replace(SIMPLE, buckets=ONE_BUCKET, stages=stages)
    found = world(0, policy, levels=levels).stages
    assert [int(stage.floors[0]) for stage in found] == floors
    forbidden = replace(policy, allow_emergency=False)
    assert len(world(0, forbidden, levels=levels).stages) == 1
