"""Conversions and activations of the CPU kernel, value by value; where its code is cached."""

import numpy as np
import pytest
import torch
from numba import njit

from pagedweight.errors import UserError
from pagedweight.kernels.cpu import machine
from pagedweight.kernels.cpu.activations import activate
from pagedweight.kernels.cpu.columns import place, round_to
from pagedweight.kernels.cpu.params import ACTIVATIONS, DTYPES
from pagedweight.kernels.reference.kernel import activate as exact


@njit
def _round_all(values, dtype):
    return np.array([round_to(v, dtype) for v in values], dtype=np.float32)


@njit
def _activate_all(values, activation):
    return np.array([activate(v, activation) for v in values], dtype=np.float32)


def _hard_floats():
    """Ties, neighbours of ties, overflow, denormals, signs, infinities, and random patterns."""
    top = np.arange(0, 1 << 16, 7, dtype=np.uint32) << 16
    ties = np.concatenate([top | low for low in (0x7FFF, 0x8000, 0x8001, 0x1000, 0x0FFF, 0x3000)])
    patterns = np.random.default_rng(0).integers(0, 1 << 32, 20000, dtype=np.uint32)
    values = np.concatenate([ties, patterns]).view(np.float32)
    return values[~np.isnan(values)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_to_nearest_even_like_torch(dtype):
    values = _hard_floats()
    want = torch.from_numpy(values).to(dtype).float().numpy()
    assert np.array_equal(_round_all(values, DTYPES[dtype]).view(np.uint32), want.view(np.uint32))
    nan = np.array([np.nan, np.uint32(0xFFFFFFFF).view(np.float32)], np.float32)
    assert np.isnan(_round_all(nan, DTYPES[dtype])).all()


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activation_error_is_a_few_float32_roundings(name):
    values = np.concatenate(
        [np.linspace(-30, 30, 40001), np.geomspace(1e-30, 1e4, 500), -np.geomspace(1e-30, 1e4, 500)]
    ).astype(np.float32)
    got = _activate_all(values, ACTIVATIONS[name]).astype(np.float64)
    want = exact(torch.from_numpy(values).double(), name).numpy()
    assert (np.abs(got - want) / np.maximum(np.abs(want), 1)).max() < 4e-7
    near = np.abs(values) < 1
    assert (np.abs(got - want)[near] <= 4e-7 * np.abs(values[near])).all()
    assert np.isnan(_activate_all(np.array([np.nan], np.float32), ACTIVATIONS[name])).all()


def test_place_is_the_bit_order_of_the_format():
    for n in range(2):
        for c in range(2):
            for s in range(4):
                assert place(8 * n + 2 * s + c) == 8 * n + 4 * c + s


def test_cache_is_outside_the_package_and_named_by_content(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.cache_directory().parent == tmp_path / "pagedweight" / "numba"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "other"))
    assert machine.cache_directory().parent == tmp_path / "other" / "numba"
    before = machine.config.CACHE_DIR
    with machine.cached_here():
        assert str(machine.cache_directory()) == machine.config.CACHE_DIR
    assert before == machine.config.CACHE_DIR


def test_a_machine_without_fused_multiply_add_is_refused(monkeypatch):
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "_target_features", lambda: ["+avx2", "-fma", "+f16c"])
    with pytest.raises(UserError, match="needs a processor with AVX2, FMA and F16C; fma missing"):
        machine.check_machine()
