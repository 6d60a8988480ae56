"""Rows dealt out to ranks: the parts are the whole, and each is planned as if it were alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_world import SIMPLE, pressure, world

from pagedweight.core.geometry import LayerShape
from pagedweight.core.holdings import Holding, Holdings
from pagedweight.core.observation import BatchSignals, Observation
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import Plan, Planner
from pagedweight.core.planner.holdings import HoldingsPlanner
from pagedweight.core.planner.score import predict_damage
from pagedweight.core.policy import FloorStage
from pagedweight.core.size_table import BlockIndex, SizeTable

EXPERTS = [Holding((0, 1), (0, 1, 2), (0,)), Holding((0, 1), (3,), (1,))]
LAYERS = [Holding((0,), (0, 1, 2, 3), (0, 1)), Holding((1,), (0, 1, 2, 3), (2, 3))]


def dealt(parts, **settings):
    context = world(**settings)
    holdings = Holdings(context.index, parts)
    return context, holdings, [context.of_holding(part) for part in parts]


@pytest.mark.parametrize("parts", [EXPERTS, LAYERS])
def test_parts_have_all_rows_once_and_name_them_alike(parts):
    context, holdings, contexts = dealt(parts)
    assert sorted(np.concatenate(holdings.rows)) == list(range(context.index.rows))
    for number, (part, own) in enumerate(zip(parts, contexts, strict=True)):
        assert (holdings.of_row[holdings.rows[number]] == number).all()
        for local, row in enumerate(holdings.rows[number].tolist()):
            layer, expert, kind = own.index.block(local)
            assert context.index.block(row) == (part.layers[layer], part.experts[expert], kind)
    assert [holdings.of_rank(rank) for rank in range(holdings.ranks)] == [
        number for number, part in enumerate(parts) for _ in part.ranks
    ]


@pytest.mark.parametrize(
    "parts",
    [
        [EXPERTS[0]],
        [*EXPERTS, Holding((1,), (3,), (2,))],
        [EXPERTS[0], replace(EXPERTS[1], ranks=(0,))],
    ],
    ids=["rows left out", "a row twice", "a rank twice"],
)
def test_what_is_no_deal_is_refused(parts):
    with pytest.raises(ValueError, match="overlap or leave something out"):
        Holdings(BlockIndex(2, 4), parts)


@pytest.mark.parametrize("parts", [EXPERTS, LAYERS])
def test_slots_of_parts_add_up_while_rows_move(parts):
    context, holdings, _ = dealt(parts)
    table = WeightPageTable(context.index, context.sizes, 4)
    table.begin_lower([0, 5, 9], [3, 2, 3])
    table.begin_reload([7, 14], [6, 5])
    assert holdings.slots(table).sum(0).tolist() == table.slots().flat().tolist()
    before = holdings.slots(table)
    table.begin_lower([1], [2])
    assert (holdings.slots(table) != before).any(), "nothing old is told again"


def test_every_stretch_of_dealt_rows_has_some_of_each_part():
    context, holdings, _ = dealt(LAYERS)
    rows = holdings.dealt(np.arange(context.index.rows))
    assert sorted(rows.tolist()) == list(range(context.index.rows))
    for start in range(0, len(rows) - 1, 2):
        assert set(holdings.of_row[rows[start : start + 2]]) == {0, 1}


@pytest.mark.parametrize("parts", [EXPERTS, LAYERS])
def test_damage_of_a_part_is_the_models(parts):
    context, holdings, contexts = dealt(parts, heads=True)
    random = np.random.default_rng(0)
    mass = random.dirichlet(np.ones(4), 2)
    rho = random.normal(size=(context.steps, context.index.rows)).astype(np.float32)
    heads = context.calibration.heads
    signals = BatchSignals(mass, rho, heads.confidence, heads.clip)
    for seen in (None, signals):
        whole = predict_damage(context, seen).predicted
        for part, rows, own in zip(parts, holdings.rows, contexts, strict=True):
            found = predict_damage(own, None if seen is None else seen.of(part, rows)).predicted
            assert np.array_equal(found, whole[:, rows])


def seen(step, free, headroom=(0, 0), blocks=(4096, 4096), **more):
    kvs = [
        pressure(free, block_bytes=each, headroom_bytes=room, **more)
        for each, room in zip(blocks, headroom, strict=True)
    ]
    return Observation(step, kvs[0], None, tuple(kvs))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 50), st.integers(1, 12), st.sampled_from([EXPERTS, LAYERS]))
def test_each_part_gives_what_a_planner_of_its_own_would(seed, pending, parts):
    context, holdings, contexts = dealt(parts, seed=seed, page_bytes=512)
    table = WeightPageTable(context.index, context.sizes, 6)
    observation = seen(0, 4, headroom=(0, 2048), blocks=(1024, 3072), pending=pending)
    plan = HoldingsPlanner(contexts, holdings).step(table, observation)
    alone = [
        Planner(own).step(WeightPageTable(own.index, own.sizes, 6), Observation(0, kv))
        for own, kv in zip(contexts, observation.holdings, strict=True)
    ]
    if all(one.satisfied for one in alone):
        wanted = {
            (int(rows[local]), int(bits))
            for rows, one in zip(holdings.rows, alone, strict=True)
            for local, bits in zip(one.rows, one.to_bits, strict=True)
        }
        assert set(zip(plan.rows.tolist(), plan.to_bits.tolist(), strict=True)) == wanted
        assert plan.returned_bytes == sum(one.returned_bytes for one in alone)
        assert plan.damage == pytest.approx(sum(one.damage for one in alone))
    assert plan.satisfied == all(one.satisfied for one in alone)
    assert plan.rows.tolist() == sorted(plan.rows.tolist())


def test_the_able_part_is_asked_for_no_more_than_the_other_can_follow_to():
    """One granule is all that the second part has; the first could give ten."""
    floors = (FloorStage("floor", (3,)),)
    policy = replace(SIMPLE, stages=floors)
    context, holdings, contexts = dealt(EXPERTS, policy=policy)
    own = contexts[1]
    spare = int(own.pages.held(own.slots(own.levels_of(np.full(own.index.rows, 6, np.int32)))))
    spare -= int(own.pages.held(own.slots(own.levels_of(np.full(own.index.rows, 3, np.int32)))))
    block = spare // 2  # so much a block: two of them at the floor
    table = WeightPageTable(context.index, context.sizes, 6)
    planner = HoldingsPlanner(contexts, holdings)
    plan = planner.step(table, seen(0, 0, blocks=(block, block), pending=6))
    first = holdings.of_row[plan.rows] == 0
    assert set(plan.to_bits[~first].tolist()) == {3}
    given = int(plan.delta[first].sum())
    assert 2 * block <= given < 3 * block
    assert not plan.satisfied


def test_rises_can_be_taken_out_of_a_plan():
    context = world()
    rows, bits = np.arange(4), np.array([6, 3, 5, 4], np.int32)
    now = np.full(4, 4, np.int32)
    plan = replace(
        Plan.none(), kind="offload", rows=rows, from_bits=now, to_bits=bits, delta=now * 0
    )
    less = plan.without_rises()
    assert (less.rows.tolist(), less.to_bits.tolist()) == ([1], [3])
    assert less.without_rises() is less
    up = replace(plan, rows=rows[:1], from_bits=now[:1], to_bits=bits[:1], delta=now[:1])
    assert up.without_rises().kind == "none"
    table = WeightPageTable(context.index, context.sizes, 4)
    less.apply(table)
    assert table.desired_bits[1] == 3
    assert (np.delete(table.desired_bits, 1) == 4).all()


@pytest.mark.parametrize(("width", "ranks"), [(72, 2), (704, 2), (1408, 4), (200, 3)])
def test_sizes_of_a_cut_are_those_of_the_largest_part(width, ranks):
    shape = LayerShape(4, 160, width)
    found = SizeTable.largest(shape, (2, 3, 4), ranks)
    parts = [SizeTable.of(shape.part(rank, ranks), (2, 3, 4)) for rank in range(ranks)]
    assert all((part.resident <= found.resident).all() for part in parts)
    for kind in range(2):
        assert found.plane_bytes[kind] in [part.plane_bytes[kind] for part in parts]
