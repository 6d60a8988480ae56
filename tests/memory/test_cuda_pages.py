"""What the driver refuses is rolled back and said with numbers (a fake driver; no GPU needed)."""

import re
from functools import partial

import numpy as np
import pytest
from fake_driver import GRANULE, FakeDriver, Status

from pagedweight.errors import Transient, UserError
from pagedweight.memory.cuda.driver import DeviceLost
from pagedweight.memory.cuda.pages import CudaPages


def pages_of(driver, count=8, **options):
    pages = CudaPages(driver, 0, **options)
    pages.create(count)
    return pages


def behind(driver, span):
    """Handle behind every page of a range, None where nothing is mapped."""
    return [driver.mapped.get(at) for at in range(span.base, span.base + span.nbytes, GRANULE)]


def test_more_than_is_free_is_refused_with_all_numbers():
    driver = FakeDriver(total_pages=4)
    pages = CudaPages(driver, 0)
    with pytest.raises(UserError, match=rf"{9 * GRANULE} bytes .* {4 * GRANULE} of {4 * GRANULE}"):
        pages.create(9)
    assert not driver.handles


def test_a_driver_that_stops_giving_pages_gets_back_what_it_gave():
    driver = FakeDriver()
    driver.fault = lambda number, name: number == 5
    with pytest.raises(UserError, match=r"gave 5 pages \(a page of .*OUT_OF_MEMORY \(2\)"):
        CudaPages(driver, 0).create(8)
    assert not driver.handles
    assert driver.free == driver.total


@pytest.mark.parametrize("page", [1000, 3 * GRANULE])
def test_a_page_size_that_the_driver_does_not_have_is_refused(page):
    with pytest.raises(UserError, match=f"page of {page} bytes is no power of two times"):
        CudaPages(FakeDriver(), 0, page)


def test_a_run_of_pages_takes_one_access_call_and_one_unmap_call():
    driver = FakeDriver()
    pages = pages_of(driver)
    span = pages.reserve(8 * GRANULE, "a", tolerant=False)
    pages.map(span, 2, [5, 0, 3])
    pages.unmap(span, 2, 3)
    names = [call[0] for call in driver.calls[-5:]]
    assert names == ["map", "map", "map", "access", "unmap"]
    assert behind(driver, span) == [None] * 8


def test_every_index_of_a_tolerant_range_has_memory_at_any_time():
    driver = FakeDriver()
    pages = pages_of(driver)
    span = pages.reserve(5 * GRANULE, "kv", tolerant=True)
    scratch = behind(driver, span)[0]
    assert behind(driver, span) == [scratch] * 5
    pages.map(span, 1, [0, 1])
    found = behind(driver, span)
    assert found[0] == found[3] == found[4] == scratch
    assert len({scratch, *found[1:3]}) == 3
    pages.unmap(span, 2, 1)
    assert behind(driver, span) == [scratch, found[1], scratch, scratch, scratch]
    assert set(range(span.base, span.base + span.nbytes, GRANULE)) <= driver.readable


def refused(work):
    """The Transient that `work` ends in, None when it succeeds."""
    try:
        work()
    except Transient as error:
        return error
    return None


def remap_with_a_refusal(tolerant, call):
    """Map three pages, unmap three; the driver refuses call number `call`: its name, or None."""
    driver = FakeDriver()
    pages = pages_of(driver)
    span = pages.reserve(6 * GRANULE, "a", tolerant)
    pages.map(span, 0, [7, 6])
    start, name = len(driver.calls), None
    driver.fault = lambda number, name: number == start + call
    for work in (partial(pages.map, span, 2, [1, 4, 2]), partial(pages.unmap, span, 1, 3)):
        before = behind(driver, span)
        error = refused(work)
        if error:
            name = driver.calls[start + call][0]
            assert re.match(r"a: .*page.* CUDA_ERROR_OUT_OF_MEMORY \(2\)", str(error))
            assert behind(driver, span) == before
            work()
    driver.fault = lambda number, name: False
    pages.unmap(span, 0, 1)
    pages.unmap(span, 4, 1)
    empty = behind(driver, span)
    assert len(set(empty)) == 1
    assert (empty[0] is not None) == tolerant
    pages.map(span, 0, range(6))
    assert len(set(behind(driver, span))) == 6
    pages.close()
    assert not driver.handles
    return name


@pytest.mark.parametrize("tolerant", [False, True])
def test_a_refusal_at_every_call_changes_nothing_and_the_next_attempt_succeeds(tolerant):
    names = {remap_with_a_refusal(tolerant, call) for call in range(20)}
    assert names >= {"map", "access", "unmap"}
    assert remap_with_a_refusal(tolerant, 20) is None


def test_a_broken_context_is_not_survived():
    driver = FakeDriver()
    pages = pages_of(driver)
    span = pages.reserve(GRANULE, "a", tolerant=False)
    driver.status, driver.fault = Status.CUDA_ERROR_ILLEGAL_ADDRESS, lambda *_: True
    with pytest.raises(DeviceLost, match=r"ILLEGAL_ADDRESS \(700\)"):
        pages.map(span, 0, [0])


def test_misuse_is_a_value_error():
    driver = FakeDriver()
    pages = pages_of(driver)
    span = pages.reserve(4 * GRANULE, "a", tolerant=False)
    pages.map(span, 0, [0])
    for bad in ([0], [2, 2], [8], [-1]):
        with pytest.raises(ValueError, match=r"exist|mapped"):
            pages.map(span, 1, bad)
    with pytest.raises(ValueError, match="do not exist"):
        pages.map(span, 3, [1, 2])
    with pytest.raises(ValueError, match="exists already"):
        pages.reserve(GRANULE, "a", tolerant=False)
    with pytest.raises(ValueError, match="created already"):
        pages.create(1)
    assert np.count_nonzero(behind(driver, span)) == 1
