"""On a real GPU: bytes add up, nothing waits for the GPU, order is kept, strays are what was said.

`torch.cuda._sleep` keeps the GPU busy for as long as a test submits work: whatever returns while it
sleeps did not wait for it.
"""

import subprocess
import sys

import numpy as np
import pytest
import torch

from pagedweight.errors import Transient, UserError
from pagedweight.memory.cuda.driver import check
from pagedweight.memory.interface import Copy, PinnedCopies

LONG = 2_000_000_000
"""Clock cycles: about a second."""


def asleep(cycles=LONG):
    """Put the GPU to sleep in order; the event that is done when it wakes up."""
    torch.cuda._sleep(cycles)
    event = torch.cuda.Event()
    event.record()
    return event


def pinned(device, nbytes, seed=0):
    array = device.host_memory(nbytes)
    array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return array


def copies(target, array):
    return PinnedCopies(
        np.array([target]), np.array([array.ctypes.data]), np.array([array.nbytes]), array
    )


def test_the_driver_reports_exactly_the_pages_that_were_created(device):
    free, total = device.pages.free_and_total()
    device.create(100)
    assert free - device.pages.free_and_total()[0] == 100 * device.page_bytes
    span = device.reserve(1000 * device.page_bytes, "a")
    device.map(span, 17, range(100))
    device.unmap(span, 60, 57)
    assert free - device.pages.free_and_total()[0] == 100 * device.page_bytes
    device.pages.close()
    assert device.pages.free_and_total() == (free, total)


def test_more_than_the_gpu_has_is_refused_with_the_numbers(device):
    free, total = device.pages.free_and_total()
    count = total // device.page_bytes + 1
    with pytest.raises(UserError, match=rf"needs {count * device.page_bytes} bytes .* {free} of"):
        device.create(count)
    assert device.pages.free_and_total()[0] == free


def test_a_map_that_the_driver_refuses_changes_nothing(device):
    """Refused for real: something else lies where the second of three pages should go."""
    page, driver, pages = device.page_bytes, device.pages.driver, device.pages
    device.create(8)
    span = device.reserve(8 * page, "a")
    other = pages._create()
    check(driver.cuMemMap(span.base + 3 * page, page, 0, other, 0), "somebody else's page")
    with pytest.raises(Transient, match=r"a: page 2 \+ 1 of 3: map: CUDA_ERROR"):
        device.map(span, 2, [0, 1, 2])
    assert not pages._ranges["a"].mapped.any()
    device.map(span, 0, [0, 1, 2])
    device.fill(span.base, 3 * page, 4)
    check(driver.cuMemUnmap(span.base + 3 * page, page), "somebody else's page")
    pages._release([other])
    device.map(span, 3, [3])
    device.fill(span.base + 3 * page, page, 5)
    assert (device.read(span.base, 3 * page) == 4).all()
    assert (device.read(span.base + 3 * page, page) == 5).all()


def test_nothing_waits_for_the_gpu(device):
    page = device.page_bytes
    device.create(64)
    span, kv = device.reserve(32 * page, "a"), device.reserve(32 * page, "kv", tolerant=True)
    device.map(span, 0, range(32))
    source = pinned(device, 8 * page)
    device.write(span.base, np.zeros(1000, np.uint8))
    torch.cuda.synchronize()
    awake = asleep()
    device.fill(span.base, page, 3)
    device.move(span.base + page, span.base, page)
    device.move_slots([span.base + 4 * page, span.base + 5 * page], [span.base] * 2, page)
    device.write(span.base, np.ones(100_000, np.uint8))
    early = device.upload(copies(span.base + 8 * page, source))
    fence = device.fence()
    device.after(early)
    device.map(kv, 3, range(32, 60))
    device.unmap(span, 31, 1)
    device.unmap(kv, 4, 20)
    tensor = device.tensor(kv.base, 32 * page)
    still_asleep = not awake.query()
    assert still_asleep, "some call waited for the GPU"
    assert not fence.done()
    assert not early.done()
    fence.wait()
    early.wait()
    assert np.array_equal(device.read(span.base + 8 * page, 8 * page), source)
    assert (device.read(span.base + 5 * page, page) == 3).all()
    assert tensor.shape == (32 * page,)


def test_an_upload_begins_after_earlier_ordered_work_and_runs_beside_later_work(device):
    page = device.page_bytes
    device.create(8)
    span = device.reserve(8 * page, "a")
    device.map(span, 0, range(8))
    source = pinned(device, 4 * page)
    asleep(LONG // 4)
    device.fill(span.base, 4 * page, 7)
    upload = device.upload(copies(span.base, source))
    awake = asleep()
    upload.wait()
    assert not awake.query(), "the upload waited for work that was submitted after it"
    assert np.array_equal(device.read(span.base, 4 * page), source), "the upload overtook the fill"


def test_pageable_uploads_are_handed_over_by_a_thread(device):
    page = device.page_bytes
    device.create(8)
    span = device.reserve(8 * page, "a")
    device.map(span, 0, range(8))
    rows = np.random.default_rng(1).integers(0, 256, (4, 2, page), dtype=np.uint8)
    awake = asleep(LONG // 2)
    device.fill(span.base, 4 * page, 7)
    upload = device.upload([Copy(span.base + n * page, rows[n, 1]) for n in range(4)])
    assert not awake.query()
    upload.wait()
    assert np.array_equal(device.read(span.base, 4 * page), rows[:, 1].reshape(-1))


def test_many_writes_while_the_gpu_is_busy_keep_their_own_data(device):
    device.create(1)
    span = device.reserve(device.page_bytes, "a")
    device.map(span, 0, [0])
    awake = asleep(LONG // 2)
    data = np.zeros(4096, np.uint8)
    for number in range(200):
        data[:] = number
        device.write(span.base + number * 4096, data)
    assert not awake.query()
    found = device.read(span.base, 200 * 4096).reshape(200, 4096)
    assert (found == np.arange(200, dtype=np.uint8)[:, None]).all()


def test_work_on_another_stream_comes_after_work_on_the_one_before(device):
    device.create(1)
    span = device.reserve(device.page_bytes, "a")
    device.map(span, 0, [0])
    asleep(LONG // 4)
    device.fill(span.base, 4096, 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        device.move(span.base + 8192, span.base, 4096)
        assert (device.read(span.base + 8192, 4096) == 1).all()


STRAY = """
import torch
from pagedweight.memory.cuda.device import CudaDevice
device = CudaDevice()
device.create(2)
span = device.reserve(4 * device.page_bytes, "planes", tolerant={tolerant})
device.map(span, 0, [0, 1])
device.fill(span.base, 2 * device.page_bytes, 9)
tensor = device.tensor(span.base, 4 * device.page_bytes)
torch.cuda.synchronize()
device.unmap(span, 1, 1)
print(tensor[5].item(), flush=True)
stray = tensor[device.page_bytes + 5]
stray.add_(1)
torch.cuda.synchronize()
print("survived", tensor[5].item(), flush=True)
"""


@pytest.mark.parametrize("tolerant", [False, True])
def test_a_stray_access_is_a_fault_but_in_a_tolerant_range(device, tolerant):
    code = STRAY.format(tolerant=tolerant)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = ran.stdout.split()
    if tolerant:
        assert lines == ["9", "survived", "9"], ran.stderr
        assert ran.returncode == 0
    else:
        assert lines == ["9"]
        assert ran.returncode != 0
        assert "illegal memory access" in ran.stderr


def test_a_graph_captured_before_pages_change_stays_valid_after_it(device):
    """The graph reads through an address in memory that never moves (decision 5)."""
    page = device.page_bytes
    device.create(4)
    span = device.reserve(4 * page, "a")
    device.map(span, 0, [0, 1])
    tensor, out = device.tensor(span.base, 2 * page), torch.zeros(1, device="cuda")
    device.fill(span.base, 2 * page, 2)
    torch.cuda.synchronize()
    out.copy_(tensor[page])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(tensor[page])
    graph.replay()
    assert out.item() == 2
    device.unmap(span, 1, 1)
    device.map(span, 1, [3])
    device.fill(span.base + page, page, 5)
    graph.replay()
    assert out.item() == 5
