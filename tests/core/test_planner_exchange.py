"""Exchange: at a constant load bits follow the signals, in two halves, and come to rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import SIMPLE, held, pressure, rows_at, world

from pagedweight.core.observation import BatchSignals, Observation
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import Plan, PlanContext, Planner
from pagedweight.core.planner.exchange import STAGE, exchange_plan
from pagedweight.core.planner.score import predict_damage
from pagedweight.core.policy import Bucket, FloorStage, Policy
from pagedweight.errors import UserError

FREE = replace(
    SIMPLE,
    buckets=(Bucket(0.0, 0.2), Bucket(0.5, 1.0), Bucket(2.0, 5.0)),
    stages=(FloorStage("floor", (2, 2, 2)),),
)
QUIET = pressure(6)
"""Between the thresholds of 4 and 12 blocks: no pressure, nothing to spare."""


def mixed(context: PlanContext, seed: int) -> np.ndarray:
    levels = np.random.default_rng(seed).integers(0, context.steps + 1, context.index.rows)
    return context.bits_of(levels.astype(np.int8))


def shifted(context: PlanContext, seed: int) -> BatchSignals:
    mass = context.usual_mass * np.random.default_rng(seed).lognormal(0, 1.5, (1, 4))
    return BatchSignals(mass / mass.sum(1, keepdims=True))


def run(
    context: PlanContext, bits: np.ndarray, signals: BatchSignals | None, steps: int = 60
) -> tuple[np.ndarray, list[Plan]]:
    """Steps of a constant load, settled in between; freed pages are headroom."""
    planner, plans, start = Planner(context), [], held(context, context.levels_of(bits))
    for step in range(steps):
        table = WeightPageTable(context.index, context.sizes, bits)
        spare = start - held(context, context.levels_of(bits))
        kv = replace(QUIET, headroom_bytes=spare)
        plan = planner.step(table, Observation(step, kv, signals))
        if plan.kind != "none":
            plans.append(plan)
        bits = bits.copy()
        bits[plan.rows] = plan.to_bits
        assert held(context, context.levels_of(bits)) <= start
    return bits, plans


def damage(context: PlanContext, bits: np.ndarray, signals: BatchSignals) -> float:
    missing = context.between(context.levels_of(bits), None)
    return float(predict_damage(context, signals).predicted[missing].sum())


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([1, 4096]))
def test_halves_alternate_and_damage_falls_until_rest(seed, page):
    context = world(seed % 97, FREE, layers=4, page_bytes=page)
    before, signals = mixed(context, seed), shifted(context, seed)
    after, plans = run(context, before, signals)
    for lowering, raising in zip(plans[::2], plans[1::2], strict=False):
        assert (lowering.kind, lowering.stage) == ("offload", STAGE)
        assert raising.kind == "reload"
        assert -raising.returned_bytes <= lowering.returned_bytes
    if plans:
        assert damage(context, after, signals) < damage(context, before, signals)
    assert exchange_plan(context, rows_of(context, after, signals)).kind == "none"


def rows_of(context: PlanContext, bits: np.ndarray, signals: BatchSignals):
    return rows_at(context, context.levels_of(bits), predict_damage(context, signals))


def test_bits_move_from_what_the_text_left_to_what_it_came_to():
    context = world(3, FREE, layers=4)
    bits = np.full(context.index.rows, 4, np.int32)
    mass = np.full((4, 4), 0.01)
    mass[:, 2] = 0.97
    after, plans = run(context, bits, BatchSignals(mass))
    by_expert = after.reshape(4, 4, 2).mean(axis=(0, 2))
    assert len(plans) >= 2
    assert by_expert[2] > 4
    assert by_expert[2] == by_expert.max()


def test_never_without_signals_or_when_switched_off():
    context = world(3, FREE, layers=4)
    assert run(context, mixed(context, 1), None)[1] == []
    off = world(3, replace(FREE, exchange_ratio=0.0), layers=4)
    on_plans = run(context, mixed(context, 1), shifted(context, 1))[1]
    assert on_plans
    assert run(off, mixed(off, 1), shifted(off, 1))[1] == []


def test_a_higher_ratio_moves_less():
    counts = []
    for ratio in (1.1, 8.0):
        context = world(3, replace(FREE, exchange_ratio=ratio), layers=4)
        counts.append(sum(p.pages for p in run(context, mixed(context, 1), shifted(context, 2))[1]))
    assert counts[0] > counts[1]


def test_pressure_takes_what_an_exchange_has_freed():
    context = world(3, FREE, layers=4)
    bits, signals = mixed(context, 1), shifted(context, 1)
    planner = Planner(context)
    table = WeightPageTable(context.index, context.sizes, bits)
    first = planner.step(table, Observation(0, QUIET, signals))
    assert first.stage == STAGE
    assert planner.queue.exchange_bytes == first.returned_bytes
    planner.step(table, Observation(1, pressure(0, pending=4), signals))
    assert planner.queue.exchange_bytes == 0


def test_floors_hold():
    stages = (FloorStage("floor", (3, 3, 3)), FloorStage("low", (2, 2, 2)))
    context = world(3, replace(FREE, stages=stages), layers=4)
    bits = np.maximum(mixed(context, 1), 3)
    after, plans = run(context, bits, shifted(context, 1))
    assert plans
    assert after.min() == 3


@pytest.mark.parametrize("ratio", [1.0, 0.5, -1.0, float("inf")])
def test_a_ratio_that_would_never_rest_is_refused(ratio):
    with pytest.raises(UserError, match="exchange_ratio must be above 1, or 0"):
        Policy(exchange_ratio=ratio)
