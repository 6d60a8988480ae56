"""Every device keeps the one interface; a new backend joins the list."""

import numpy as np
import pytest

from pagedweight.memory.fake import FakeDevice
from pagedweight.memory.host import HostDevice
from pagedweight.memory.interface import Copy

PAGE = 64 << 10


@pytest.fixture(params=[HostDevice, FakeDevice], ids=["host", "fake"])
def device(request):
    made = request.param(PAGE)
    made.create(8)
    yield made
    made.close()


def pattern(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_ranges_are_whole_pages_at_page_addresses(device):
    span = device.reserve(PAGE + 1, "a")
    assert span.nbytes == 2 * PAGE
    assert span.base % PAGE == 0


def test_upload_move_fill_write_read(device):
    span = device.reserve(4 * PAGE, "a")
    device.map(span, 1, [5, 0])
    base, data = span.base + PAGE, pattern(1000)
    device.upload([Copy(base, data[:400]), Copy(base + 400, data[400:])]).wait()
    assert np.array_equal(device.read(base, 1000), data)
    device.move(base + PAGE, base, 1000)
    device.fill(base + PAGE + 10, 20, 7)
    device.write(base + PAGE, np.array([258], np.uint16).view(np.uint8))
    expect = data.copy()
    expect[10:30] = 7
    expect[:2] = (2, 1)
    assert np.array_equal(device.read(base + PAGE, 1000), expect)
    assert np.array_equal(device.read(base, 1000), data)


def test_a_strided_source_arrives_contiguous(device):
    span = device.reserve(PAGE, "a")
    device.map(span, 0, [0])
    source = pattern(6 * 8 * 16).reshape(6, 8, 16)[:, 2:5]
    device.upload([Copy(span.base, source)]).wait()
    assert np.array_equal(device.read(span.base, source.nbytes), source.reshape(-1))


def test_a_written_buffer_may_change_after_the_call(device):
    span = device.reserve(PAGE, "a")
    device.map(span, 0, [0])
    data = np.full(64, 3, np.uint8)
    device.write(span.base, data)
    data[:] = 9
    assert (device.read(span.base, 64) == 3).all()


def test_a_fence_is_done_once_the_ordered_work_is(device):
    span = device.reserve(PAGE, "a")
    device.map(span, 0, [0])
    device.fill(span.base, PAGE, 1)
    fence = device.fence()
    fence.wait()
    assert fence.done()
    done = device.upload([Copy(span.base, pattern(8))])
    device.after(done)
    device.move(span.base + 64, span.base, 8)
    assert np.array_equal(device.read(span.base + 64, 8), pattern(8))


def test_a_tensor_is_the_memory_itself(device):
    span = device.reserve(2 * PAGE, "a", tolerant=True)
    tensor = device.tensor(span.base, 2 * PAGE)
    device.map(span, 1, [2])
    device.fill(span.base + PAGE, PAGE, 5)
    assert tensor[PAGE:].eq(5).all()
    tensor[PAGE] = -1
    assert device.read(span.base + PAGE, 1)[0] == 255


def test_stray_access_to_a_tolerant_range_is_survived_and_never_becomes_contents(device):
    span = device.reserve(2 * PAGE, "a", tolerant=True)
    device.map(span, 0, [0])
    device.fill(span.base, PAGE, 77)
    device.unmap(span, 0, 1)
    device.fill(span.base, PAGE, 77)
    device.map(span, 0, [1])
    assert not (device.read(span.base, PAGE) == 77).any()


def test_misuse_is_a_value_error(device):
    span = device.reserve(2 * PAGE, "a")
    device.map(span, 0, [0])
    with pytest.raises(ValueError, match="mapped"):
        device.map(span, 0, [1])
    with pytest.raises(ValueError, match="exist"):
        device.map(span, 1, [8])
    with pytest.raises(ValueError, match="not mapped"):
        device.unmap(span, 0, 2)
