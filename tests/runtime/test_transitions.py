"""Thousands of random transitions under a decoding model, on a device that lags behind the host.

Steps are queued on the fake device and run later; each must compute with exactly the bits that were
committed when it was launched. Retired planes and unmapped pages are poisoned, so a step that reads
what it should not computes NaN or nonsense (cases 21 and 22).
"""

from functools import partial

import numpy as np
import pytest
import torch
from ranks import Driver, Expected, RandomTier, kernel_output, rank_of, same

from pagedweight.memory.fake import FakeDevice, fail_at
from pagedweight.memory.host import HostDevice
from pagedweight.memory.interface import DONE
from pagedweight.runtime.integrity import check_worker

TOKENS = torch.randn((2, 64), generator=torch.Generator().manual_seed(1))


def decode(device, steps, seed, lag=None, layers=4, experts=16):
    """Run `steps` with random plans; `lag`: how a fake device catches up between them."""
    tier = RandomTier(layers, experts)
    rank = rank_of(device, pages=3000 * 4096 // device.page_bytes + 200, tier=tier)
    driver, expected, wrong, ran = Driver(rank, seed), Expected(tier, TOKENS), [], []

    def step(number, layer, chosen, bits):
        ran.append(number)
        found = kernel_output(rank, layer, TOKENS, chosen)
        if not same(found, expected.output(layer, bits, chosen)):
            wrong.append(number)

    for number in range(steps):
        rank.worker.apply(driver.plan())
        chosen = driver.rng.choice(experts, 2, replace=False).tolist()
        bits = rank.table.committed_bits.copy()
        work = partial(step, number, number % layers, chosen, bits)
        if lag:
            device.launch(work)
            lag(device, driver.rng)
        else:
            work()
        if number % 10 == 0:
            check_worker(rank.worker, contents=number % 200 == 0 and not lag)
        assert not wrong, f"step {wrong[0]} computed with other planes than were committed"
    device.fence().wait()
    assert ran == list(range(steps))
    assert not wrong
    check_worker(rank.worker, contents=True)
    return rank


def behind(device, rng):
    """Up to 150 pieces of ordered work (two or three steps) wait; uploads end when they like."""
    device.run(until=max(device.executed, device.submitted - int(rng.integers(0, 150))))
    device.run_uploads(int(rng.integers(0, 6)))


def test_ten_thousand_transitions_while_steps_lag_behind():
    rank = decode(FakeDevice(4096, lazy=True), 900, 0, behind)
    counted = rank.worker.counters
    assert counted.rows_lowered + counted.rows_raised >= 10_000
    assert min(counted.rows_lowered, counted.rows_raised) > 2_000
    assert min(counted.aborted_batches, counted.stale_copies, counted.granules_grown) > 30
    assert counted.rolled_back == 0


def test_transitions_on_real_memory_with_uploads_on_their_thread():
    device = HostDevice()
    rank = decode(device, 100, 3, layers=2, experts=4)
    assert rank.worker.counters.rows_raised > 100
    device.close()


def test_a_device_that_refuses_one_call_in_twelve():
    device, rng = FakeDevice(4096, lazy=True), np.random.default_rng(5)
    tier = RandomTier(layers=2, experts=4)
    rank = rank_of(device, pages=200, tier=tier)
    driver, expected = Driver(rank, 7), Expected(tier, TOKENS)
    faulty = lambda number, name: rng.random() < 1 / 12  # noqa: E731
    for number in range(400):
        device.fault = device.upload_fault = faulty
        rank.worker.apply(driver.plan())
        behind(device, driver.rng)
        device.fault = device.upload_fault = fail_at()
        check_worker(rank.worker, contents=number % 50 == 0)
        found = kernel_output(rank, number % 2, TOKENS, [number % 4])
        bits = rank.table.committed_bits
        assert same(found, expected.output(number % 2, bits, [number % 4]))
    assert rank.worker.counters.rolled_back > 50
    assert rank.worker.counters.rows_lowered > 100


def test_these_tests_would_notice_pages_unmapped_under_running_steps():
    device = FakeDevice(4096, lazy=True)
    device.fence = lambda: DONE
    with pytest.raises(AssertionError, match=r"unmapped|computed with"):
        decode(device, 200, 0, behind)


def test_these_tests_would_notice_uploads_that_overtake_ordered_work():
    device = FakeDevice(4096, lazy=True)
    device.run_uploads = lambda count: [device.perform(u) for u in device.waiting[:count]]
    with pytest.raises(AssertionError, match=r"unmapped|computed with"):
        decode(device, 400, 0, behind)
