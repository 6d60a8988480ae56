"""Ranks that hold other experts, or other layers: one plan, and what each of them has by itself."""

from __future__ import annotations

import numpy as np
import pytest
from engines import Engine

from pagedweight.memory.fake import fail_at
from pagedweight.runtime.integrity import check_worker
from pagedweight.runtime.messages import Signals, merged
from pagedweight.runtime.signals import whole_signals

BURST = [*range(0, 40, 2), *[40] * 40]
EXPERTS = [((0, 1), (0, 1)), ((0, 1), (2, 3))]
UNEVEN = [((0, 1), (0, 1, 2)), ((0, 1), (3,))]
LAYERS = [((0,), (0, 1, 2, 3)), ((1,), (0, 1, 2, 3))]
DEALT = {
    "experts": {"dealt": EXPERTS, "pages": 90},
    "experts unevenly": {"dealt": UNEVEN, "pages": [108, 92]},
    "layers": {"dealt": LAYERS, "pages": 58},
}


def engine_of(name: str, lag: int = 1, **config: object) -> Engine:
    return Engine(ranks=2, lag=lag, **DEALT[name], **config)


def whole_bits(engine: Engine) -> list[int]:
    """Committed bits of the model's rows, out of what its ranks hold."""
    out = np.zeros(engine.holdings.index.rows, int)
    for rows, bits in zip(engine.holdings.rows, engine.bits(), strict=True):
        out[rows] = bits
    return out.tolist()


def run(engine: Engine, load: list[int]) -> list:
    return [engine.step(wanted) for wanted in load]


@pytest.mark.parametrize("name", DEALT)
@pytest.mark.parametrize("lag", [0, 2])
def test_a_burst_takes_bits_of_every_rank_and_gives_them_back(name, lag):
    engine = engine_of(name, lag)
    start = engine.controller.granules.usable_blocks
    run(engine, BURST)
    assert engine.controller.granules.usable_blocks > 41 > start
    assert len(engine.blocks.used) == 41, "everybody got what they wanted"
    assert engine.controller.status.failures == 0
    assert all(np.mean(bits) < 6 for bits in engine.bits())
    engine.idle()
    assert whole_bits(engine) == [6] * 16 == engine.controller.table.committed_bits.tolist()
    for rank in engine.ranks:
        check_worker(rank.worker, contents=True)


def test_each_rank_gives_what_its_own_memory_lacks():
    """The same experts, but one rank has room for all its bits and KV, the other has not."""
    engine = engine_of("experts", 1)
    tight = Engine(ranks=2, lag=1, dealt=EXPERTS, pages=[150, 90])
    for one in (engine, tight):
        run(one, BURST)
    assert tight.controller.granules.usable_blocks >= 41
    assert tight.bits()[0] == [6] * 8
    assert np.mean(tight.bits()[1]) < 5
    assert np.mean(engine.bits()[0]) < 6


def test_nobody_gives_more_than_the_least_able_can_follow():
    """One rank is at its floor before the load is met: what the other could give is in vain."""
    engine = Engine(ranks=2, lag=1, dealt=EXPERTS, pages=[150, 100], granules=30, block=4096)
    start = engine.controller.granules.usable_blocks
    run(engine, [46] * 80)
    assert engine.controller.status.floor_hit
    assert engine.bits() == [[6] * 8, [2] * 8]
    assert 46 > engine.controller.granules.usable_blocks > start
    assert engine.controller.free_pages[1] < 4, "all that the tighter rank has is in use"


@pytest.mark.parametrize("name", DEALT)
def test_rows_of_a_batch_are_committed_at_the_same_step_on_all_ranks(name):
    engine = engine_of(name)
    for wanted in BURST:
        before = np.array(whole_bits(engine))
        batches = {b.number: b for b in [*getattr(engine, "sent", []), ()] if b}
        plan = engine.step(wanted)
        batches |= {batch.number: batch for batch in plan.prepare}
        engine.sent = list(batches.values())
        after = np.array(whole_bits(engine))
        moved = set(np.flatnonzero(before != after).tolist())
        named = {row for number in plan.commit for row in batches[number].rows}
        assert moved <= named
        for number in plan.commit:
            rows = list(batches[number].rows)
            assert (after[rows] == batches[number].bits).all() or not moved & set(rows)


@pytest.mark.parametrize("name", DEALT)
@pytest.mark.parametrize("call", ["upload", "map", "write"])
def test_a_rank_that_refuses_keeps_the_rows_of_the_others_too(name, call):
    engine = engine_of(name)
    failing = engine.devices[1]
    failing.fault = lambda number, what: what == call
    run(engine, BURST[:30])
    assert engine.ranks[1].worker.counters.rolled_back > 0
    if call == "upload":
        assert whole_bits(engine) == [6] * 16
        assert engine.ranks[0].worker.counters.rows_lowered == 0
        assert engine.controller.status.failures > 0
    failing.fault = fail_at()
    run(engine, [40] * 60)
    assert len(engine.blocks.used) == 41, "after that it goes on as usual"
    engine.idle()
    assert whole_bits(engine) == [6] * 16


def test_the_same_loads_give_the_same_plans():
    plans = [run(engine_of("layers"), BURST) for _ in range(2)]
    assert plans[0] == plans[1]
    assert any(plan.commit for plan in plans[0])


def test_a_batch_has_rows_of_every_holding():
    engine = engine_of("layers", rows_per_batch=6)
    plans = run(engine, BURST)
    first = next(batch for plan in plans for batch in plan.prepare)
    assert {engine.holdings.of_row[row] for row in first.rows} == {0, 1}


def test_signals_are_put_together_and_none_is_taken_for_the_whole():
    engine = engine_of("experts unevenly")
    reports = []
    for number, rank in enumerate(engine.ranks):
        layers, experts, _ = engine.holdings.parts[number].index.shape
        part = np.full((layers, experts), number + 1, np.float32)
        features = np.full((layers, experts, 2, 3), number + 1, np.float32)
        reports.append(rank.worker.report(Signals(part, part * 2, features)))
    found = whole_signals(merged(reports), engine.holdings)
    assert found.mass.tolist() == [[1, 1, 1, 2]] * 2
    assert found.tokens.tolist() == [[2, 2, 2, 4]] * 2
    assert found.features[:, :, 1, 2].tolist() == [[1, 1, 1, 2]] * 2
    assert whole_signals(reports[0], engine.holdings) is None
