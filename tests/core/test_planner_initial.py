"""The plan before serving: within the budget, near the bound, floors, and its two refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import SIMPLE, held, world

from pagedweight.core.planner import initial_plan
from pagedweight.core.policy import FloorStage
from pagedweight.errors import UserError

WITH_EMERGENCY = replace(
    SIMPLE, stages=(*SIMPLE.stages, FloorStage("emergency", (2,), emergency=True))
)
seeds = st.integers(0, 10_000)
QUICK = settings(max_examples=40, deadline=None)


def bytes_at(context: object, bits: int) -> int:
    return held(context, np.full(16, bits - 2))  # type: ignore[arg-type]


@QUICK
@given(seeds, st.sampled_from([1, 4096, 32768]), st.booleans(), st.floats(0, 1))
def test_within_budget_and_above_the_bound(
    seed: int, page: int, convex: bool, share: float
) -> None:
    context = world(seed, page_bytes=page, convex=convex)
    low, high = bytes_at(context, 3), bytes_at(context, 6)
    budget = int(low + share * (high - low))
    plan = initial_plan(context, budget)
    greedy = initial_plan(context, budget, swaps=False)
    assert plan.held_bytes == held(context, context.levels_of(plan.bits)) <= budget
    assert plan.bits.min() >= 3
    assert plan.bound <= plan.damage * (1 + 1e-9) + 1e-12
    assert plan.damage <= greedy.damage * (1 + 1e-9)
    s = context.calibration.sensitivity.reshape(16, 5)
    steps = np.maximum(s[:, :-1] - s[:, 1:], 0)
    harm = sum(steps[r, b - 2 :].sum() for r, b in enumerate(plan.bits.tolist()))
    np.testing.assert_allclose(plan.damage, harm, rtol=1e-5, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(seeds, st.booleans(), st.floats(0.02, 0.98))
def test_close_to_the_optimum(seed: int, convex: bool, share: float) -> None:
    context = world(seed, layers=1, levels=(3, 4, 5), convex=convex)
    low, high = held(context, np.zeros(8, int)), held(context, np.full(8, 2))
    budget = int(low + share * (high - low))
    s = context.calibration.sensitivity.reshape(8, 3)
    steps = np.maximum(s[:, :-1] - s[:, 1:], 0)
    size = context.sizes.resident
    best = min(
        sum(steps[r, lv:].sum() for r, lv in enumerate(levels))
        for levels in itertools.product(range(3), repeat=8)
        if sum(int(size[r % 2, lv]) for r, lv in enumerate(levels)) <= budget
    )
    plan = initial_plan(context, budget)
    assert plan.bound <= best * (1 + 1e-6) + 1e-12
    assert best <= plan.damage * (1 + 1e-6) + 1e-12
    assert plan.damage <= best + steps.sum(1).max()


def test_beats_uniform_at_equal_bytes_and_random() -> None:
    context = world(7, layers=8)
    rows = context.index.rows
    budget = held(context, np.full(rows, 2))
    plan = initial_plan(context, budget)
    s = context.calibration.sensitivity.reshape(rows, 5)
    uniform = float((s[:, 2] - s[:, 4]).sum())
    assert plan.damage < 0.8 * uniform
    assert plan.damage <= 1.05 * plan.bound


def test_floor_goes_to_the_emergency_level_only_below_the_usual_one() -> None:
    context = world(1, WITH_EMERGENCY)
    assert initial_plan(context, bytes_at(context, 3)).bits.tolist() == [3] * 16
    below = initial_plan(context, bytes_at(context, 3) - 1)
    assert below.bits.min() == 2
    assert below.bits.max() >= 3
    assert initial_plan(context, 10**12).bits.tolist() == [6] * 16


def test_rows_below_the_least_bits_need_no_emergency_while_all_together_have_their_bytes() -> None:
    stages = (FloorStage("floor", (2,), least_bits=3), *WITH_EMERGENCY.stages[1:])
    free = replace(SIMPLE, stages=stages)
    context = world(1, free)
    budget = bytes_at(context, 3)
    plan = initial_plan(context, budget)
    assert plan.bits.min() == 2
    assert plan.held_bytes <= budget
    assert plan.damage <= initial_plan(world(1, WITH_EMERGENCY), budget).damage
    assert initial_plan(context, budget - 1).bits.min() == 2
    with pytest.raises(UserError, match="at 3 bits"):
        initial_plan(world(1, replace(free, allow_emergency=False)), budget - 1)


@pytest.mark.parametrize("policy, bits", [(SIMPLE, 3), (WITH_EMERGENCY, 2)])
def test_too_small_a_budget_is_refused_with_both_numbers(policy: object, bits: int) -> None:
    context = world(1, policy)  # type: ignore[arg-type]
    need = bytes_at(context, bits)
    with pytest.raises(
        UserError, match=rf"{need - 1} bytes .* at {bits} bits.* takes {need} bytes"
    ):
        initial_plan(context, need - 1)
