"""Bits follow the text while the load stays: controller, ranks and memory together."""

from __future__ import annotations

import numpy as np
import pytest
from engines import Engine

from pagedweight.core.observation import BatchSignals
from pagedweight.runtime.integrity import check_worker


class Told:
    """In place of `SignalWindow`: what the test says is routed."""

    def __init__(self) -> None:
        self.table: BatchSignals | None = None

    def add(self, signals) -> None:
        pass

    def current(self, step: int) -> BatchSignals | None:
        return self.table

    def hot(self, expert: int) -> None:
        mass = np.full((2, 4), 0.02)
        mass[:, expert] = 0.94
        self.table = BatchSignals(mass)


def hot_bits(engine: Engine, expert: int) -> float:
    return float(np.mean([np.reshape(bits, (2, 4, 2))[:, expert] for bits in engine.bits()]))


@pytest.mark.parametrize("ranks, lag", [(1, 0), (2, 2)])
def test_bits_move_to_what_a_new_text_needs_and_come_to_rest(ranks, lag):
    engine = Engine(ranks, lag)
    engine.controller._signals = told = Told()
    told.hot(0)
    for _ in range(80):
        engine.step(40)
    before, usable = engine.bits(), engine.controller.granules.usable_blocks
    assert len(engine.blocks.used) == 41
    assert hot_bits(engine, 0) > hot_bits(engine, 3)
    told.hot(3)
    for _ in range(150):
        engine.step(40)
    assert engine.bits() != before
    assert engine.bits()[0] == engine.bits()[-1]
    assert hot_bits(engine, 3) > hot_bits(engine, 0)
    assert len(engine.blocks.used) == 41, "nobody lost a block for it"
    assert engine.controller.granules.usable_blocks == usable
    rest = engine.bits()
    for _ in range(60):
        engine.step(40)
        assert engine.controller.status.plan_kind == "none"
    assert engine.bits() == rest
    for rank in engine.ranks:
        check_worker(rank.worker, contents=True)
