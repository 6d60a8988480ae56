"""A page has one owner; a shortage takes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.memory.fake import FakeDevice
from pagedweight.memory.pool import PagePool, PoolShort


def test_the_reserve_is_for_urgent_takers_only():
    pool = PagePool(FakeDevice(), 10, reserve=3)
    held = pool.take(7, "kv")
    with pytest.raises(PoolShort, match=r"kv needs 1 pages .* 3 are free and 3 of them"):
        pool.take(1, "kv")
    assert pool.can_take() == 0
    assert len(pool.take(3, "tables", urgent=True)) == 3
    with pytest.raises(PoolShort):
        pool.take(1, "tables", urgent=True)
    pool.give(held, "kv")
    assert pool.can_take() == 4


def test_pages_of_somebody_else_are_not_given_back():
    pool = PagePool(FakeDevice(), 4)
    pages = pool.take(2, "a")
    with pytest.raises(ValueError, match="does not hold"):
        pool.give(pages, "b")
    assert pool.held_by("a") == 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans())))
def test_no_page_is_lost_or_held_twice(orders):
    pool = PagePool(FakeDevice(), 12, reserve=2)
    held = {name: [] for name in "abc"}
    for name, count, take in orders:
        if take:
            before = pool.free
            try:
                held[name] += pool.take(count, name)
            except PoolShort:
                assert pool.free == before < count + 2
        else:
            back = [held[name].pop() for _ in range(min(count, len(held[name])))]
            pool.give(back, name)
        pool.check_integrity(held)
    assert pool.free + sum(map(len, held.values())) == pool.total


def test_integrity_notices_a_lost_page():
    pool = PagePool(FakeDevice(), 3)
    pages = pool.take(2, "a")
    with pytest.raises(AssertionError, match="differ"):
        pool.check_integrity({"a": pages[:1]})
