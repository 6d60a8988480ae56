"""Policies at equal bytes: each is what it says, none is inert, the planner is the real one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import SHAPE, world

from pagedweight.core.observation import BatchSignals
from pagedweight.core.planner import PlanContext, initial_plan
from pagedweight.core.planner.score import predict_damage
from pagedweight.core.policies import LOADS, POLICIES, PagedPolicy, make_policy
from pagedweight.core.policies.baselines import uniform_level
from pagedweight.core.policy import Bucket, FloorStage, Policy
from pagedweight.errors import UserError

FREE = Policy(stages=(FloorStage("floor", (2,) * 13),))
"""The defaults with every row free to go to the lowest level."""


def total(context: PlanContext, bits: float) -> int:
    levels = context.sizes.levels
    each = context.sizes.resident.sum(axis=0) * (context.index.rows // 2)
    return int(np.interp(bits, levels, each))


def shifted(context: PlanContext, seed: int) -> BatchSignals:
    """Signals of a text that routes quite differently, residual included."""
    rng = np.random.default_rng(seed)
    mass = context.usual_mass * rng.lognormal(0, 1.0, context.usual_mass.shape)
    heads = context.calibration.heads
    rho = rng.normal(0, 1.0, (context.steps, context.index.rows)).astype(np.float32)
    return BatchSignals(
        mass / mass.sum(1, keepdims=True),
        None if heads is None else rho,
        None if heads is None else heads.confidence,
        None if heads is None else heads.clip,
    )


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([name for name in POLICIES if name != "dynamic-layer"]),
    st.floats(2.0, 6.0),
    st.integers(0, 1000),
    st.sampled_from(LOADS),
)
def test_bytes_are_the_budget_to_less_than_a_plane_and_its_table(name, bits, seed, load):
    context = world(seed, replace(FREE, offload_blocks=4, reload_blocks=12), heads=True)
    budget = total(context, bits)
    policy = make_policy(name, context, budget, seed, load)
    for signals in (None, shifted(context, seed)):
        held = policy.assign(signals).resident_bytes(context.sizes)
        assert budget - held < context.delta.max() + 64
        assert held <= budget


def test_uniform_is_one_level_and_draws_only_the_rest():
    context = world(1, FREE)
    exact = make_policy("uniform", context, total(context, 4.0), 0).assign(None).bits
    assert (exact == 4).all()
    drawn = [make_policy("uniform", context, total(context, 3.4), seed) for seed in (0, 0, 1)]
    first, again, other = (policy.assign(None).bits for policy in drawn)
    assert set(np.unique(first)) == {3, 4}
    assert (first == again).all()
    assert (first != other).any()


def test_random_takes_more_than_two_levels_and_follows_its_seed():
    context = world(1, FREE)
    drawn = [make_policy("random", context, total(context, 3.4), seed) for seed in (0, 0, 1)]
    first, again, other = (policy.assign(None).bits for policy in drawn)
    assert len(np.unique(first)) > 2
    assert (first == again).all()
    assert (first != other).any()


def test_random_respects_the_floor_that_static_has():
    context = world(1, replace(FREE, stages=(FloorStage("floor", (3,) * 13),)))
    bits = make_policy("random", context, total(context, 3.5), 0).assign(None).bits
    assert bits.min() == 3


def test_static_is_the_initial_plan_and_beats_chance():
    context = world(2, FREE)
    budget = total(context, 3.0)
    bits = make_policy("static", context, budget).assign(shifted(context, 0)).bits
    assert (bits.ravel() == initial_plan(context, budget).bits).all()
    chance = make_policy("random", context, budget, 3).assign(None).bits
    assert damage(context, bits) < 0.8 * damage(context, chance)


def damage(context: PlanContext, bits: np.ndarray, signals: BatchSignals | None = None) -> float:
    """Predicted damage of bits [L, E, 2] under signals."""
    missing = context.between(context.levels_of(bits.ravel().astype(np.int32)), None)
    return float(predict_damage(context, signals).predicted[missing].sum())


def test_dynamic_layer_reads_the_budget_and_keeps_the_higher_level():
    context = world(2, FREE)
    budget = total(context, 3.4)
    found = make_policy("dynamic-layer", context, budget).assign(None)
    assert found.high is not None
    assert (found.bits == 3).all()
    assert (found.high == 4).all()
    assert found.read_bytes(context.sizes) == pytest.approx(budget, abs=1)
    blocks = context.index.rows // 2
    tables = int(context.sizes.table_bytes[:, 1].sum()) * blocks
    assert found.resident_bytes(context.sizes) == total(context, 4.0) + tables
    assert 3.0 < found.mean_bits(context.sizes) < 4.0
    at_a_level = make_policy("dynamic-layer", context, total(context, 4.0)).assign(None)
    assert at_a_level.high is None
    assert (at_a_level.bits == 4).all()


@pytest.mark.parametrize("load", LOADS)
def test_paged_follows_the_text(load):
    context = world(4, FREE, layers=8, heads=True)
    policy = PagedPolicy(context, total(context, 3.0), load)
    policy.assign(None)
    found = {}
    for seed in (1, 2):
        signals = shifted(context, seed)
        found[seed] = policy.assign(signals).bits
        static = make_policy("static", context, total(context, 3.0)).assign(None).bits
        assert damage(context, found[seed], signals) < 0.9 * damage(context, static, signals)
    assert (found[1] != found[2]).any()


def test_paged_at_the_first_text_is_what_calibration_alone_wants():
    context = world(4, FREE, layers=8, heads=True)
    budget = total(context, 3.0)
    paged = PagedPolicy(context, budget).assign(None).bits
    best = initial_plan(context, budget).damage / context.damage_unit
    assert damage(context, paged) < 1.1 * best


def test_paged_does_not_remember_texts_that_are_over():
    """Under requests that come and go, bits return in between: the newest signals alone count."""
    context = world(4, FREE, layers=8, heads=True)
    policy = PagedPolicy(context, total(context, 3.0))
    fresh = PagedPolicy(context, total(context, 3.0))
    policy.assign(shifted(context, 1))
    signals = shifted(context, 2)
    assert (policy.assign(signals).bits == fresh.assign(signals).bits).all()


SWITCHES = ("use_routing", "use_residual", "use_movement", "use_sensitivity")


@pytest.mark.parametrize("switch", SWITCHES)
def test_no_switch_is_inert(switch):
    whole = world(5, FREE, layers=8, heads=True)
    part = world(5, replace(FREE, **{switch: False}), layers=8, heads=True)
    signals = shifted(whole, 3)
    with_it = PagedPolicy(whole, total(whole, 3.0)).assign(signals).bits
    without = PagedPolicy(part, total(part, 3.0)).assign(signals).bits
    assert (with_it != without).any()


def test_without_movement_bits_are_the_static_plan_whatever_comes():
    context = world(5, replace(FREE, use_movement=False), heads=True)
    policy = PagedPolicy(context, total(context, 3.0))
    static = make_policy("static", context, total(context, 3.0)).assign(None).bits
    for signals in (None, shifted(context, 1)):
        assert (policy.assign(signals).bits == static).all()


@pytest.mark.parametrize(
    "change",
    [
        {"alpha": 0.2},
        {"stages": (FloorStage("floor", (3,) * 13),)},
        {"buckets": tuple(Bucket(float(n), 1.0 + n) for n in range(13))},
    ],
)
def test_policy_options_change_the_bits(change):
    whole, other = (world(6, policy, heads=True) for policy in (FREE, replace(FREE, **change)))
    budget, signals = total(whole, 3.3), shifted(whole, 1)
    bits = [PagedPolicy(context, budget).assign(signals).bits for context in (whole, other)]
    assert (bits[0] != bits[1]).any()


def test_an_emergency_makes_room_below_the_usual_floor():
    usual = FloorStage("floor", (3,) * 13)
    policy = Policy(offload_blocks=4, reload_blocks=12)
    policy = replace(policy, stages=(usual, *policy.stages[1:]))
    context = world(7, policy)
    budget = total(context, 2.5)
    bits = PagedPolicy(context, budget).assign(None)
    assert bits.resident_bytes(context.sizes) <= budget
    assert bits.bits.min() == 2


@pytest.mark.parametrize("bits", (2.5, 3.0, 3.5))
def test_the_default_policy_is_as_free_as_one_without_least_bits(bits):
    """Above the bytes of 3 bits in its first stage, below them in an emergency."""
    default, free = (world(7, replace(Policy(), stages=s)) for s in (Policy().stages, FREE.stages))
    budget, signals = total(default, bits), shifted(default, 1)
    plans = [PagedPolicy(context, budget).assign(signals) for context in (default, free)]
    for plan in plans:
        assert plan.bits.min() == 2
        assert plan.resident_bytes(default.sizes) <= budget
    sensitivity = default.calibration.sensitivity
    harm = [
        float(np.take_along_axis(sensitivity, plan.bits[..., None].astype(int) - 2, 3).sum())
        for plan in plans
    ]
    assert harm[0] == pytest.approx(harm[1], rel=0.05)


def test_a_budget_that_is_too_small_is_refused_with_numbers():
    context = world(1, FREE)
    for name in POLICIES:
        with pytest.raises(UserError, match=r"a budget of 1000 bytes .* at 2 bits"):
            make_policy(name, context, 1000)
    with pytest.raises(UserError, match="policy 'best' is not one of uniform, random"):
        make_policy("best", context, total(context, 3.0))
    level, spare = uniform_level(context, total(context, 3.0) + 5)
    assert (level, spare) == (1, 5)
    assert SHAPE.experts == context.index.experts
