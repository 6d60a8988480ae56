"""KV gives memory back under load: granules drain, and are there again when KV is short."""

from collections import deque

import pytest
from engines import POLICY, Engine

from pagedweight.runtime.controller import BlockDemand
from pagedweight.runtime.granules import GranuleState

SIZE = 8
BURST = [*range(0, 160, 8), *[160] * 25]
DRAINING = GranuleState.DRAINING


class Turnover:
    """Requests of one block each that come and go; blocks are handed out in the order in which they
    were freed, as vLLM does, so that those in use lie scattered over all granules."""

    def __init__(self, engine, count):
        self.engine = engine
        self.queue = deque(engine.blocks.free())
        self.held = deque(self.queue.popleft() for _ in range(count))
        engine.blocks.used = {0, *self.held}

    def step(self, leaving, coming, pending=0):
        """`leaving` requests end, `coming` begin, `pending` wait; the plan of the step."""
        engine, blocks = self.engine, self.engine.blocks
        engine.hear()
        for _ in range(leaving):
            self.queue.append(self.held.popleft())
        blocks.used = {0, *self.held}
        left = len(set(blocks.free())) + blocks.held_back
        plan = engine.controller.step(BlockDemand(left, pending, min(pending, 1)), blocks)
        free = set(blocks.free())
        self.queue.extend(sorted(free.difference(self.queue)))
        for _ in range(coming):
            block = next(block for block in self.queue if block in free)
            self.queue.remove(block)
            self.held.append(block)
            free.remove(block)
        blocks.used = {0, *self.held}
        for rank in engine.ranks:
            rank.worker.apply(plan)
            engine.reports.append(rank.worker.report())
        engine.check()
        for device in engine.devices:
            device.run()
            device.run_uploads()
        return plan


@pytest.fixture
def low():
    """A burst has taken bits and is over; 40 blocks are still in use, in every granule some."""
    engine = Engine(size=SIZE)
    for wanted in BURST:
        engine.step(wanted)
    assert engine.controller.status.mean_bits[2] < 5
    engine.step(0)
    turnover = Turnover(engine, 0)
    turnover.queue = deque(
        sorted(turnover.queue, key=lambda block: (block % SIZE * 5 % SIZE, block))
    )
    turnover.held = deque(turnover.queue.popleft() for _ in range(40))
    engine.blocks.used = {0, *turnover.held}
    free = [g for g in engine.controller.granules.having(GranuleState.USABLE) if is_free(engine, g)]
    assert not free
    return engine, turnover


def is_free(engine, granule):
    return granule > 0 and not engine.blocks.in_use(granule)


def test_bits_come_back_although_blocks_in_use_are_scattered_over_all_granules(low):
    engine, turnover = low
    for _ in range(200):
        turnover.step(leaving=1, coming=1)
        assert len(turnover.held) == 40
    assert engine.bits() == [[6] * 16]
    assert not engine.controller.granules.count(DRAINING)


def test_a_request_that_stays_keeps_its_block_and_one_granule(low):
    engine, turnover = low
    stays = turnover.held[-1]
    for _ in range(200):
        turnover.step(leaving=len(turnover.held) > 1, coming=0)
    assert turnover.held == deque([stays])
    assert engine.bits() == [[6] * 16]
    assert stays // SIZE in engine.ranks[0].worker.kv.backed


def test_empty_granules_go_in_place_of_those_that_long_requests_hold(low):
    """The requests of the granules that drain stay for good; all others end."""
    engine, turnover = low
    granules = engine.controller.granules
    turnover.step(leaving=0, coming=0)
    while not granules.count(DRAINING):
        turnover.step(leaving=0, coming=0)
    stuck = set(granules.having(DRAINING))
    stay = [block for block in turnover.held if block // SIZE in stuck]
    turnover.held = deque([*(b for b in turnover.held if b not in stay), *stay])
    for _ in range(300):
        turnover.step(leaving=len(turnover.held) > len(stay), coming=0)
    assert list(turnover.held) == stay
    assert engine.bits() == [[6] * 16]
    assert not granules.count(DRAINING)
    assert {block // SIZE for block in stay} <= set(granules.having(GranuleState.USABLE))


def test_granules_that_drain_are_there_again_when_requests_wait(low):
    engine, turnover = low
    granules, blocks = engine.controller.granules, engine.blocks
    for _ in range(40):
        turnover.step(leaving=0, coming=0)
    assert granules.count(DRAINING)
    backed, held, bits = granules.usable_blocks, blocks.held_back, engine.bits()
    assert held > 0
    visible = len(blocks.free())
    plan = turnover.step(leaving=0, coming=0, pending=visible - POLICY.offload_blocks)
    assert not granules.count(DRAINING)
    assert not blocks.held_back
    assert len(blocks.free()) == visible + held, "all at once"
    assert granules.usable_blocks == backed
    assert not plan.grow
    assert not any(batch.lowers for batch in plan.prepare), "KV had what it needed"
    assert engine.bits() == bits
    for _ in range(POLICY.dwell_steps - 1):
        turnover.step(leaving=0, coming=0, pending=visible - POLICY.offload_blocks)
        assert not granules.count(DRAINING), "not again at once"
