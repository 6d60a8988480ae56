"""A rank does what plans say, whole or not at all, whatever is refused and whatever is late."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ranks import Expected, RandomTier, kernel_output, rank_of, same

from pagedweight.core.geometry import LayerShape
from pagedweight.errors import UserError
from pagedweight.memory.fake import FakeDevice, fail_at
from pagedweight.memory.host import HostDevice
from pagedweight.memory.interface import POISON
from pagedweight.memory.limits import resident_anonymous_bytes
from pagedweight.runtime.integrity import check_worker
from pagedweight.runtime.messages import Batch, Stage, StepPlan
from pagedweight.runtime.weights import piece

TOKENS = torch.randn((2, 64), generator=torch.Generator().manual_seed(1))


def stage_of(rank, number):
    return {s.number: s.stage for s in rank.worker.report().batches}.get(number)


class RankMachine(RuleBasedStateMachine):
    """Plans, lags and refusals in any order hypothesis likes."""

    @initialize(lazy=st.booleans(), pages=st.sampled_from([120, 180, 400]))
    def start(self, lazy, pages):
        self.device = FakeDevice(4096, lazy)
        self.rank = rank_of(self.device, pages, granules=6)
        self.step = self.number = 0

    @rule(data=st.data(), at_once=st.booleans())
    def prepare(self, data, at_once):
        lowers = data.draw(st.booleans())
        bits = self.rank.table.committed_bits
        rows = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True))
        rows = [r for r in rows if (bits[r] > 2 if lowers else bits[r] < 6)]
        levels = [
            data.draw(st.integers(2, int(bits[r]) - 1) if lowers else st.integers(bits[r] + 1, 6))
            for r in rows
        ]
        if rows:
            if at_once:  # waiting in order for a copy that will fail: the end of a real device
                self.device.upload_fault = fail_at()
            self.number += 1
            batch = Batch(self.number, lowers, tuple(rows), tuple(levels))
            self.apply(prepare=(batch,), commit=(batch.number,) if at_once else ())

    @rule()
    def commit(self):
        self.apply(commit=tuple(range(1, self.number + 1)))

    @rule(data=st.data())
    def abort(self, data):
        numbers = st.sets(st.integers(0, self.number + 1), max_size=2)
        self.apply(abort=tuple(data.draw(numbers)))

    @rule(grow=st.sets(st.integers(0, 5)), shrink=st.sets(st.integers(0, 5)))
    def kv(self, grow, shrink):
        self.apply(grow=tuple(grow - shrink), shrink=tuple(shrink))

    @rule(count=st.integers(1, 60))
    def device_goes_on(self, count):
        self.device.run(until=self.device.executed + count)

    @rule(count=st.integers(1, 3))
    def uploads_end(self, count):
        self.device.run_uploads(count)

    @rule(ahead=st.integers(0, 12), late=st.booleans())
    def something_will_be_refused(self, ahead, late):
        if late:
            self.device.upload_fault = fail_at(self.device.upload_number)
        else:
            self.device.fault = fail_at(len(self.device.calls) + ahead)

    def apply(self, **orders):
        self.step += 1
        self.rank.worker.apply(StepPlan(self.step, **orders))

    @invariant()
    def sound(self):
        if hasattr(self, "rank"):
            check_worker(self.rank.worker)

    def teardown(self):
        if hasattr(self, "rank"):
            self.device.fault = self.device.upload_fault = fail_at()
            self.device.run()
            self.device.run_uploads()
            self.apply()
            check_worker(self.rank.worker, contents=True)


TestRank = RankMachine.TestCase
TestRank.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def scenario(rank):
    """Plans that use every kind of call: both ways, KV both ways, compaction."""
    down = Batch(1, True, (0, 1, 4, 7), (2, 2, 3, 2))
    up = Batch(2, False, (2, 3, 9), (6, 5, 6))
    again = Batch(3, False, (0, 4), (6, 5))
    yield StepPlan(1, prepare=(down,), grow=(0, 1, 2))
    yield StepPlan(2, commit=(1,), prepare=(up,), grow=(0, 1, 2))
    yield StepPlan(3, commit=(1, 2), shrink=(1,), prepare=(again,))
    yield StepPlan(4, commit=(1, 2, 3), grow=(0, 1, 2, 4))
    yield StepPlan(5, grow=(0, 1, 2, 4))


def test_a_refusal_at_every_call_is_rolled_back_counted_and_mended_by_a_retry():
    """Cases 20 and 21: map, upload, move, fill and table writes, one after the other."""
    tier, names, call = RandomTier(), set(), 0
    while True:
        device = FakeDevice(4096)
        rank = rank_of(device, tier=tier)
        start = len(device.calls)
        device.fault = fail_at(start + call)
        for plan in scenario(rank):
            rank.worker.apply(plan)
            check_worker(rank.worker)
        if len(device.calls) <= start + call:
            break
        assert rank.worker.counters.rolled_back >= 1
        names.add(device.calls[start + call][0])
        number = 10
        for rows, bits, lowers in [
            ((0, 1, 4, 7), (2, 2, 3, 2), True),
            ((2, 3, 9), (6, 5, 6), False),
        ]:
            todo = [i for i, row in enumerate(rows) if rank.table.committed_bits[row] == 4]
            if todo:
                number += 1
                batch = Batch(
                    number, lowers, tuple(rows[i] for i in todo), tuple(bits[i] for i in todo)
                )
                rank.worker.apply(StepPlan(9, prepare=(batch,), grow=(0, 1, 2, 4)))
                rank.worker.apply(StepPlan(10, commit=(number,)))
                assert rank.table.committed_bits[list(batch.rows)].tolist() == list(batch.bits)
        rank.worker.apply(StepPlan(11, grow=(0, 1, 2, 4)))
        assert rank.worker.kv.backed == [0, 1, 2, 4]
        check_worker(rank.worker, contents=True)
        call += 1
    assert names == {"map", "unmap", "upload", "move", "fill", "write"}
    assert call > 40


def test_growth_that_is_refused_goes_on_with_fewer_granules_at_once():
    """Every third map is refused for good: four granules apart, of two maps each, never come at
    once."""
    device = FakeDevice(4096)
    rank, maps, wished = rank_of(device, block=8192), [0], (0, 2, 4, 6)

    def fault(number, name):
        maps[0] += name == "map"
        return name == "map" and maps[0] % 3 == 0

    device.fault = fault
    backed = []
    for step in range(1, 13):
        rank.worker.apply(StepPlan(step, grow=wished))
        backed.append(len(rank.worker.kv.backed))
        check_worker(rank.worker)
    assert backed[0] == 0
    assert backed[-1] == len(wished)
    assert rank.worker.counters.granules_grown == len(wished)


def test_an_upload_that_breaks_off_halfway_is_rolled_back():
    device = FakeDevice(4096)
    rank = rank_of(device)
    before = rank.pool.free
    device.upload_fault = fail_at(device.upload_number)
    rank.worker.apply(StepPlan(1, prepare=(Batch(1, False, (0, 1), (6, 6)),)))
    rank.worker.apply(StepPlan(2, commit=(1,)))
    assert stage_of(rank, 1) is Stage.FAILED
    assert rank.table.committed_bits[0] == 4
    rank.worker.apply(StepPlan(3))
    assert rank.pool.free == before
    rank.worker.apply(StepPlan(4, prepare=(Batch(2, False, (0, 1), (6, 6)),)))
    rank.worker.apply(StepPlan(5, commit=(2,)))
    assert stage_of(rank, 2) is Stage.DONE
    check_worker(rank.worker, contents=True)


def test_a_late_copy_for_a_batch_given_up_changes_nothing():
    """The row is wanted again while the first copy still runs: it must not count as the second."""
    device = FakeDevice(4096, lazy=True)
    rank = rank_of(device)
    rank.worker.apply(StepPlan(1, prepare=(Batch(1, False, (0,), (6,)),)))
    epoch = rank.table.epoch[0]
    rank.worker.apply(StepPlan(2, abort=(1,), prepare=(Batch(2, False, (0,), (5,)),)))
    assert rank.table.epoch[0] == epoch + 1
    device.run()
    device.run_uploads(1)
    rank.worker.apply(StepPlan(3, commit=(1, 2)))
    assert rank.worker.counters.stale_copies == 1
    assert stage_of(rank, 2) is Stage.COPYING
    assert rank.table.committed_bits[0] == 4
    device.run()
    device.run_uploads()
    rank.worker.apply(StepPlan(4, commit=(1, 2)))
    assert rank.table.committed_bits[0] == 5
    assert stage_of(rank, 1) is Stage.FAILED
    check_worker(rank.worker, contents=True)


def test_lowering_reads_the_old_planes_until_the_commit_and_poison_afterwards():
    device = FakeDevice(4096, lazy=True)
    rank = rank_of(device)
    expected = Expected(rank.tier, TOKENS)
    plane = rank.weights.address(piece(2, 3))
    rank.worker.apply(StepPlan(1, prepare=(Batch(1, True, (2,), (3,)),)))
    outputs = []
    device.launch(lambda: outputs.append(kernel_output(rank, 0, TOKENS)))
    device.run()
    device.run_uploads()
    device.launch(lambda: outputs.append(kernel_output(rank, 0, TOKENS)))
    rank.worker.apply(StepPlan(2, commit=(1,)))
    device.launch(lambda: outputs.append(kernel_output(rank, 0, TOKENS)))
    assert stage_of(rank, 1) is Stage.COMMITTED, "the step before the commit has not run yet"
    device.run()
    rank.worker.apply(StepPlan(3))
    assert stage_of(rank, 1) is Stage.DONE
    bits = np.full(rank.tier.index.rows, 4)
    assert same(outputs[0], expected.output(0, bits))
    assert same(outputs[1], expected.output(0, bits))
    bits[2] = 3
    assert same(outputs[2], expected.output(0, bits))
    arena = rank.weights.arena_of(piece(2, 3))
    tail = device.read(arena.address(arena.end), arena.slot_bytes)
    assert (tail == POISON).all()
    assert plane != rank.weights.address(piece(2, 2))


def test_planes_that_move_are_found_at_their_new_addresses_by_the_same_table():
    """The table's storage never moves: CUDA graphs captured once stay valid (case 22)."""
    device = FakeDevice(4096)
    rank = rank_of(device)
    storage = [t.planes.data_ptr() for t in rank.weights.tables]
    last = rank.weights.tables[1].planes[2, 0, 0].item()
    rank.worker.apply(StepPlan(1, prepare=(Batch(1, True, (0, 2), (2, 2)),), commit=(1,)))
    assert rank.weights.tables[1].planes[2, 0, :4].tolist() != [last] * 4
    assert rank.worker.counters.compacted_bytes > 0
    assert [t.planes.data_ptr() for t in rank.weights.tables] == storage
    found = kernel_output(rank, 1, TOKENS)
    assert same(found, Expected(rank.tier, TOKENS).output(1, rank.table.committed_bits))


def test_the_reserve_lets_bits_fall_when_not_a_page_is_left_for_kv():
    device = FakeDevice(4096)
    rank = rank_of(device, pages=200, reserve=10, granules=60)
    rank.worker.apply(StepPlan(1, grow=tuple(range(60))))
    assert len(rank.worker.kv.backed) < 60
    while rank.pool.can_take():
        rank.pool.take(1, "somebody")
    rank.worker.apply(StepPlan(2, prepare=(Batch(1, False, (0,), (5,)),)))
    assert stage_of(rank, 1) is Stage.FAILED
    assert "reserve" in rank.worker.report().batches[0].reason
    rank.worker.apply(StepPlan(3, prepare=(Batch(2, True, (0, 2, 4), (2, 2, 2)),), commit=(2,)))
    assert stage_of(rank, 2) is Stage.DONE
    assert rank.pool.can_take() > 0


def test_a_plan_that_does_not_fit_the_budget_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"need \d+ pages of 4096 bytes .* leaves 20: raise"):
        rank_of(FakeDevice(4096), pages=28, bits=6)


def test_a_busy_row_is_refused_and_nothing_happens_to_the_others():
    rank = rank_of(FakeDevice(4096, lazy=True))
    rank.worker.apply(StepPlan(1, prepare=(Batch(1, True, (0, 1), (3, 3)),)))
    rank.worker.apply(StepPlan(2, prepare=(Batch(2, True, (1, 2), (2, 2)),)))
    assert stage_of(rank, 2) is Stage.FAILED
    assert rank.table.goal_bits[2] == 4
    check_worker(rank.worker)


def test_resident_memory_of_the_host_backend_follows_the_bits():
    device = HostDevice()
    tier = RandomTier(layers=1, experts=6, hidden=512, intermediate=512)
    assert tier.shape == LayerShape(6, 512, 512)
    rank = rank_of(device, pages=600, bits=6, poison=False, tier=tier)
    high = resident_anonymous_bytes()
    rows = tuple(range(tier.index.rows))
    freed = sum(tier.sizes.delta(row % 2, 6, 2) for row in rows)
    down = Batch(1, True, rows, (2,) * len(rows))
    rank.worker.apply(StepPlan(1, prepare=(down,), commit=(1,)))
    low = resident_anonymous_bytes()
    assert stage_of(rank, 1) is Stage.DONE
    assert high - low > 0.8 * freed
    up = Batch(2, False, rows, (6,) * len(rows))
    rank.worker.apply(StepPlan(2, prepare=(up,), commit=(2,)))
    assert resident_anonymous_bytes() - low > 0.8 * freed
    check_worker(rank.worker, contents=True)
    device.close()
