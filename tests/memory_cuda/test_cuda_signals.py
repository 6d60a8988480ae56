"""Signals are read without waiting for the GPU, and every sum arrives exactly once."""

import torch

from pagedweight.runtime.signals import RankStats


def add(stats, value):
    for layer, sums in enumerate(stats.layers):
        sums.mass.add_(value)
        sums.tokens.add_(1)
        sums.features[:, 1].add_(layer)


def test_sums_come_one_call_later_and_are_counted_once(device):
    stats = RankStats(3, 5, device.torch_device)
    add(stats, 2.0)
    assert stats.take() is None
    add(stats, 7.0)
    torch.cuda.synchronize()
    first = stats.take()
    torch.cuda.synchronize()
    second = stats.take()
    assert first.mass.shape == first.tokens.shape == (3, 5)
    assert (first.mass == 2).all()
    assert (second.mass == 7).all()
    assert (first.tokens == 1).all()
    assert first.features.shape == (3, 5, 2, 3)
    assert (first.features[2, :, 1] == 2).all()
    assert (first.features[:, :, 0] == 0).all()
    torch.cuda.synchronize()
    assert (stats.take().mass == 0).all()


def test_a_busy_gpu_is_not_waited_for(device):
    stats = RankStats(2, 4, device.torch_device)
    stats.take()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    awake = torch.cuda.Event()
    awake.record()
    add(stats, 1.0)
    assert stats.take() is not None
    assert stats.take() is None
    assert not awake.query()
    torch.cuda.synchronize()
    assert (stats.take().mass == 1).all()
