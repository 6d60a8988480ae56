"""Granules are backed whole or not at all, zeroed, and share pages rightly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedweight.errors import Transient
from pagedweight.memory.fake import FakeDevice, fail_at
from pagedweight.memory.host import HostDevice
from pagedweight.memory.kv_region import Granule, KVRegion, strided_granules
from pagedweight.memory.pool import PagePool, PoolShort

PAGE = 4096


def region_of(device, pages, layers=3, blocks=12, per_granule=2, block_bytes=1500):
    layer_bytes = blocks * block_bytes
    granules = strided_granules(
        blocks, per_granule, block_bytes, [layer * layer_bytes for layer in range(layers)]
    )
    pool = PagePool(device, pages)
    return KVRegion(device, pool, layers * layer_bytes, granules, tolerant=False, poison=True), pool


class RegionMachine(RuleBasedStateMachine):
    @initialize(block=st.sampled_from([256, 1500, 4096, 9000]), lazy=st.booleans())
    def start(self, block, lazy):
        self.device = FakeDevice(PAGE, lazy)
        self.region, self.pool = region_of(self.device, 30, block_bytes=block)
        self.mark = {}

    @rule(data=st.data())
    def grow(self, data):
        parked = [g for g in range(6) if g not in self.mark]
        some = data.draw(st.lists(st.sampled_from(parked), unique=True) if parked else st.just([]))
        need, backed = self.region.pages_for(some), self.region.backed
        try:
            self.region.grow(some)
        except PoolShort:
            assert need > self.pool.free
            assert self.region.backed == backed
        except Transient:
            assert self.region.backed == backed
        else:
            for granule in some:
                self.mark[granule] = 0
                assert not self.contents(granule).any(), "new KV is zero"
                self.mark[granule] = granule + 1
                self.write(granule)

    @rule(data=st.data())
    def shrink(self, data):
        some = data.draw(
            st.lists(st.sampled_from(sorted(self.mark)), unique=True) if self.mark else st.just([])
        )
        for granule in some:
            del self.mark[granule]
        try:
            self.region.shrink(some)
        except Transient:
            assert set(some).isdisjoint(self.region.backed)

    @rule(catch_up=st.booleans())
    def reclaim(self, catch_up):
        if catch_up:
            self.device.run()
        try:
            self.region.reclaim()
        except Transient:
            return

    @rule(ahead=st.integers(0, 6))
    def refuse_a_coming_call(self, ahead):
        self.device.fault = fail_at(len(self.device.calls) + ahead)

    @invariant()
    def sound(self):
        if not hasattr(self, "region"):
            return
        self.region.check_integrity()
        self.pool.check_integrity({"kv": self.region.backing.pages()})
        assert self.region.backed == sorted(self.mark)
        for granule, mark in self.mark.items():
            assert (self.contents(granule) == mark).all(), f"granule {granule} was disturbed"

    def contents(self, granule):
        base = self.region.backing.span.base
        extents = self.region.granules[granule].extents
        return np.concatenate([self.device.read(base + at, size) for at, size in extents])

    def write(self, granule):
        base, mark = self.region.backing.span.base, self.mark[granule]
        fault, self.device.fault = self.device.fault, fail_at()
        for at, size in self.region.granules[granule].extents:
            self.device.fill(base + at, size, mark)
        self.device.fault = fault


TestRegion = RegionMachine.TestCase
TestRegion.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_growth_that_fails_at_any_call_is_undone_and_a_retry_succeeds():
    """One map or fill after the other refuses (kvcached #262, #364)."""
    reached = 0
    for call in range(100):
        device = FakeDevice(PAGE)
        region, pool = region_of(device, 40)
        region.grow([0])
        free, start = pool.free, len(device.calls)
        device.fault = fail_at(start + call)
        try:
            region.grow([2, 4])
        except Transient:
            reached += 1
            assert region.backed == [0]
            region.reclaim()
            assert pool.free == free
            region.check_integrity()
            region.grow([2, 4])
        else:
            break
        assert region.backed == [0, 2, 4]
        region.check_integrity()
    assert reached == len(device.calls) - start > 6


def test_a_shared_page_stays_while_either_granule_needs_it():
    device = FakeDevice(PAGE)
    pool = PagePool(device, 3)
    halves = [Granule(((0, 6000),)), Granule(((6000, 6000),))]
    region = KVRegion(device, pool, 12000, halves, tolerant=False)
    region.grow([0, 1])
    assert pool.free == 0
    region.shrink([0])
    assert region.reclaim() == 1
    region.grow([0])
    region.shrink([0, 1])
    assert region.reclaim() == 3


def test_neighbouring_granules_are_mapped_in_one_call():
    device = FakeDevice(PAGE)
    region, _ = region_of(device, 40, layers=1, block_bytes=4096)
    region.grow(list(range(6)))
    assert [name for name, *_ in device.calls] == ["map", "fill"]


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40)), min_size=1, max_size=6))
def test_extents_that_overlap_or_leave_are_refused(extents):
    covered = [b for at, size in extents for b in range(at, at + size)]
    good = all(size for _, size in extents) and len(set(covered)) == len(covered)
    good = good and max(covered) < 100
    granules = [Granule((extent,)) for extent in extents]
    device = FakeDevice(PAGE)
    if good:
        KVRegion(device, PagePool(device, 1), 100, granules)
    else:
        with pytest.raises(ValueError, match="extent"):
            KVRegion(device, PagePool(device, 1), 100, granules)


def test_strided_granules_cover_every_block_once():
    granules = strided_granules(10, 4, 100, [0, 1000, 5000])
    assert [g.nbytes for g in granules] == [1200, 1200, 600]
    assert granules[2].extents == ((800, 200), (1800, 200), (5800, 200))


def test_the_tensor_of_a_host_region_is_where_granules_appear():
    device = HostDevice()
    pool = PagePool(device, 4)
    granules = strided_granules(4, 1, 64 << 10, [0])
    region = KVRegion(device, pool, 4 * (64 << 10), granules)
    tensor = region.tensor()
    assert tensor.numel() == region.nbytes
    region.grow([1])
    tensor[64 << 10 : 128 << 10] = 3
    region.shrink([1])
    region.reclaim()
    region.grow([1])
    assert not tensor[64 << 10 : 128 << 10].any()
    device.close()
