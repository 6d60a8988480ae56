"""Every device keeps the one interface; a new backend joins the list."""

import numpy as np
import pytest
import torch

from pagedweight.memory.fake import FakeDevice
from pagedweight.memory.host import HostDevice
from pagedweight.memory.interface import Copy, PinnedCopies

SMALL = 64 << 10


def gpu(page_bytes):
    """The CUDA backend, whose pages are what the driver gives."""
    if not torch.cuda.is_available():
        pytest.skip("the CUDA backend is tested on a machine with a GPU")
    from pagedweight.memory.cuda.device import CudaDevice

    return CudaDevice()


@pytest.fixture(
    params=[HostDevice, FakeDevice, pytest.param(gpu, marks=pytest.mark.gpu)],
    ids=["host", "fake", "cuda"],
)
def device(request):
    made = request.param(SMALL)
    made.create(8)
    yield made
    made.close()


@pytest.fixture
def page(device):
    return device.page_bytes


def pattern(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_ranges_are_whole_pages_at_page_addresses(device, page):
    span = device.reserve(page + 1, "a")
    assert span.nbytes == 2 * page
    assert span.base % page == 0


def test_upload_move_fill_write_read(device, page):
    span = device.reserve(4 * page, "a")
    device.map(span, 1, [5, 0])
    base, data = span.base + page, pattern(1000)
    device.upload([Copy(base, data[:400]), Copy(base + 400, data[400:])]).wait()
    assert np.array_equal(device.read(base, 1000), data)
    device.move(base + page, base, 1000)
    device.fill(base + page + 10, 20, 7)
    device.write(base + page, np.array([258], np.uint16).view(np.uint8))
    expect = data.copy()
    expect[10:30] = 7
    expect[:2] = (2, 1)
    assert np.array_equal(device.read(base + page, 1000), expect)
    assert np.array_equal(device.read(base, 1000), data)


def test_a_strided_source_arrives_contiguous(device, page):
    span = device.reserve(page, "a")
    device.map(span, 0, [0])
    source = pattern(6 * 8 * 16).reshape(6, 8, 16)[:, 2:5]
    device.upload([Copy(span.base, source)]).wait()
    assert np.array_equal(device.read(span.base, source.nbytes), source.reshape(-1))


def test_slots_of_one_size_move_together(device, page):
    span = device.reserve(2 * page, "a")
    device.map(span, 0, [1, 0])
    data = pattern(2 * page)
    device.upload([Copy(span.base, data)]).wait()
    targets = [span.base + slot * 512 for slot in (0, 7, 3)]
    sources = [span.base + page + slot * 512 for slot in (1, 5, 2)]
    device.move_slots(targets, sources, 512)
    device.move_slots([span.base + 512], [span.base], 512)
    for slot, source in {0: 1, 7: 5, 3: 2, 1: 1}.items():
        found = device.read(span.base + slot * 512, 512)
        assert np.array_equal(found, data[page + source * 512 :][:512])


def test_pieces_given_by_address_arrive(device, page):
    span = device.reserve(page, "a")
    device.map(span, 0, [0])
    source = getattr(device, "host_memory", lambda nbytes: np.empty(nbytes, np.uint8))(3000)
    source[:] = pattern(3000)
    at = np.array([2000, 0, 700], np.int64)
    sizes = np.array([1000, 500, 300], np.int64)
    copies = PinnedCopies(span.base + at, source.ctypes.data + at, sizes, source)
    device.upload(copies).wait()
    found = device.read(span.base, 3000)
    for start, nbytes in zip(at, sizes, strict=True):
        assert np.array_equal(found[start : start + nbytes], source[start : start + nbytes])


def test_a_written_buffer_may_change_after_the_call(device, page):
    span = device.reserve(page, "a")
    device.map(span, 0, [0])
    data = np.full(64, 3, np.uint8)
    device.write(span.base, data)
    data[:] = 9
    assert (device.read(span.base, 64) == 3).all()


def test_a_fence_is_done_once_the_ordered_work_is(device, page):
    span = device.reserve(page, "a")
    device.map(span, 0, [0])
    device.fill(span.base, page, 1)
    fence = device.fence()
    fence.wait()
    assert fence.done()
    done = device.upload([Copy(span.base, pattern(8))])
    device.after(done)
    device.move(span.base + 64, span.base, 8)
    assert np.array_equal(device.read(span.base + 64, 8), pattern(8))


def test_a_tensor_is_the_memory_itself(device, page):
    span = device.reserve(2 * page, "a", tolerant=True)
    tensor = device.tensor(span.base, 2 * page)
    device.map(span, 1, [2])
    device.fill(span.base + page, page, 5)
    assert tensor[page:].eq(5).all()
    tensor[page] = -1
    assert device.read(span.base + page, 1)[0] == 255


def test_stray_access_to_a_tolerant_range_is_survived_and_never_becomes_contents(device, page):
    span = device.reserve(2 * page, "a", tolerant=True)
    device.map(span, 0, [0])
    device.fill(span.base, page, 77)
    device.unmap(span, 0, 1)
    device.fill(span.base, page, 77)
    device.map(span, 0, [1])
    assert not (device.read(span.base, page) == 77).any()


def test_misuse_is_a_value_error(device, page):
    span = device.reserve(2 * page, "a")
    device.map(span, 0, [0])
    with pytest.raises(ValueError, match="mapped"):
        device.map(span, 0, [1])
    with pytest.raises(ValueError, match="exist"):
        device.map(span, 1, [8])
    with pytest.raises(ValueError, match="not mapped"):
        device.unmap(span, 0, 2)
