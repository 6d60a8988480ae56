"""Arenas stay dense, lose no content, and survive a refusal at any call."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedweight.errors import Transient
from pagedweight.memory.arena import Arena, ArenaFull
from pagedweight.memory.fake import FakeDevice, fail_at
from pagedweight.memory.interface import POISON
from pagedweight.memory.pool import PagePool, PoolShort

PAGE = 4096


def compact(arena, device):
    moves = arena.moves()
    arena.copy_moves(moves)
    arena.settle(moves)
    arena.release(device.fence())
    return moves


class ArenaMachine(RuleBasedStateMachine):
    """Against a dict owner -> contents; the device lags and refuses at random."""

    @initialize(slot=st.sampled_from([128, 1408, 4096, 5000 // 128 * 128]), lazy=st.booleans())
    def start(self, slot, lazy):
        self.device = FakeDevice(PAGE, lazy)
        self.pool = PagePool(self.device, 12, reserve=1)
        self.place = {}
        self.arena = Arena(self.device, self.pool, "planes", slot, 64, self.moved, poison=True)
        self.data = {}
        self.pinned = set()
        self.next = 0

    def moved(self, owners, slots):
        self.place.update(zip(owners.tolist(), slots.tolist(), strict=True))

    @rule(count=st.integers(0, 8), urgent=st.booleans())
    def allocate(self, count, urgent):
        owners = list(range(self.next, self.next + count))
        before, room = self.arena.end, 64 - self.arena.used
        try:
            slots = self.arena.allocate(owners, urgent)
        except ArenaFull:
            assert count > room
            return
        except PoolShort:
            assert self.arena.end == before
            assert self.arena.pages_for(count) > self.pool.can_take(urgent)
            return
        except Transient:
            assert self.arena.end == before
            return
        self.next += count
        for owner, slot in zip(owners, slots, strict=True):
            self.place[owner] = slot
            contents = np.random.default_rng(owner).integers(0, 255, self.arena.slot_bytes)
            self.data[owner] = contents.astype(np.uint8)
            self.without_fault(self.device.write, self.arena.address(slot), self.data[owner])

    @rule(data=st.data())
    def free(self, data):
        free = sorted(self.data.keys() - self.pinned)
        owners = data.draw(st.lists(st.sampled_from(free), unique=True) if free else st.just([]))
        slots = [self.place.pop(owner) for owner in owners]
        for owner in owners:
            del self.data[owner]
        try:
            self.arena.free(slots)
        except Transient:
            return
        for slot in slots:
            contents = self.device.read(self.arena.address(slot), self.arena.slot_bytes)
            assert (contents == POISON).all()

    @rule(data=st.data())
    def pin(self, data):
        if self.data:
            owner = data.draw(st.sampled_from(sorted(self.data)))
            self.pinned.add(owner)
            self.arena.pin([self.place[owner]])

    @rule()
    def unpin(self):
        self.arena.unpin([self.place[owner] for owner in self.pinned])
        self.pinned.clear()

    @rule()
    def compact(self):
        try:
            compact(self.arena, self.device)
        except Transient:
            return
        if not self.pinned:
            assert self.arena.end == self.arena.used == len(self.data)
            pages = -(-len(self.data) * self.arena.slot_bytes // PAGE)
            assert self.arena.backing.mapped - self.arena.backing.surplus == pages

    @rule()
    def device_catches_up_and_pages_return(self):
        self.device.run()
        surplus = self.arena.backing.surplus
        try:
            assert self.arena.backing.reclaim() == surplus
        except Transient:
            return
        assert self.arena.backing.surplus == 0

    @rule()
    def reclaim_before_the_fence_touches_nothing_in_use(self):
        with suppress(Transient):
            self.arena.backing.reclaim()

    @rule(ahead=st.integers(0, 5))
    def refuse_a_coming_call(self, ahead):
        self.device.fault = fail_at(len(self.device.calls) + ahead)

    @invariant()
    def sound(self):
        if not hasattr(self, "arena"):
            return
        self.arena.check_integrity()
        self.pool.check_integrity({"planes": self.arena.backing.pages()})
        assert self.arena.used == len(self.data)
        for owner, slot in self.place.items():
            assert self.arena.owner(slot) == owner

    def teardown(self):
        if not hasattr(self, "arena"):
            return
        for owner, slot in self.place.items():
            contents = self.device.read(self.arena.address(slot), self.arena.slot_bytes)
            assert np.array_equal(contents, self.data[owner]), f"contents of {owner}"

    def without_fault(self, call, *arguments):
        fault, self.device.fault = self.device.fault, fail_at()
        call(*arguments)
        self.device.fault = fault


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_scattered_frees_return_whole_pages():
    device = FakeDevice(PAGE)
    pool = PagePool(device, 64)
    arena = Arena(device, pool, "planes", 1408, 100, lambda owners, slots: None)
    slots = arena.allocate(range(100))
    assert pool.total - pool.free == -(-100 * 1408 // PAGE)
    arena.free(slots[::2])
    assert pool.total - pool.free == 35
    moves = compact(arena, device)
    assert len(moves) == 25
    assert arena.backing.reclaim() == 35 - -(-50 * 1408 // PAGE)
    arena.check_integrity()


def test_a_page_waits_for_the_fence_of_its_last_use():
    device = FakeDevice(PAGE, lazy=True)
    pool = PagePool(device, 8)
    arena = Arena(device, pool, "planes", PAGE, 8, lambda owners, slots: None)
    slots = arena.allocate(range(4))
    device.run()
    arena.free(slots[2:])
    device.launch(lambda: device.require_mapped(arena.address(slots[3]), PAGE, "a late step"))
    compact(arena, device)
    assert arena.backing.reclaim() == 0
    again = arena.allocate([7])
    arena.free(again)
    device.launch(lambda: device.require_mapped(arena.address(again[0]), PAGE, "a later step"))
    compact(arena, device)
    device.run(until=1)
    assert arena.backing.reclaim() == 1, "only the page that the later step does not use"
    device.run()
    assert arena.backing.reclaim() == 1


@pytest.mark.parametrize("call", range(4))
def test_growth_that_fails_at_any_page_run_is_undone(call):
    device = FakeDevice(PAGE)
    pool = PagePool(device, 8)
    arena = Arena(device, pool, "planes", PAGE, 8, lambda owners, slots: None)
    arena.allocate([1])
    device.fault = fail_at(len(device.calls) + call)
    try:
        arena.allocate([2, 3])
    except Transient:
        assert call == 0
        assert arena.used == 1
        arena.backing.reclaim()
        assert pool.free == 7
        arena.allocate([2, 3])
    assert arena.used == 3
    assert pool.free == 5
    arena.check_integrity()
