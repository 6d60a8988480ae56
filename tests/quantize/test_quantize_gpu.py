"""Quantize and calibrate on a GPU: its kernels against tensor operations, its results against the
CPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from factory import VOCAB, make_checkpoint
from pagedweight.calibrate.measure import MeasureOptions, measure
from pagedweight.calibrate.text import CalibrationTokens
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.core.geometry import KINDS
from pagedweight.quantize import torch_descent, torch_rows
from pagedweight.quantize.pipeline import QuantizeOptions, quantize_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    "seed_bits, levels, cols, columns",
    (
        (2, 5, 200, slice(40, 168)),
        (2, 5, 140, slice(128, 140)),
        (3, 2, 65, slice(0, 65)),
        (2, 1, 33, slice(0, 33)),
        (2, 7, 70, slice(0, 70)),
    ),
)
def test_the_descent_kernel_does_what_tensor_operations_do(
    seed_bits: int, levels: int, cols: int, columns: slice
) -> None:
    gen = torch.Generator(CUDA).manual_seed(seed_bits + cols)
    size, given = (3, 130, cols), {"generator": gen, "device": CUDA}
    weights = torch.randn(size, **given)
    inputs = torch.randn((3, 400, 5), **given) @ torch.randn((3, 5, cols), **given)
    inputs += 0.3 * torch.randn(inputs.shape, **given)
    product = inputs.mT @ inputs / 400
    widths = range(seed_bits, seed_bits + levels)
    tables = [torch.randn((*size[:2], 1 << b), **given).sort(-1).values for b in widths]
    codes = torch.randint(0, 1 << widths[-1], size, dtype=torch.uint8, **given)
    pull, trust = torch.rand((3, levels), **given) + 0.1, torch.rand(levels, **given)
    apart = torch_descent.errors(weights, tables, codes)
    pulled = (apart.flatten(1, 2) @ product[:, :, columns]).view(*apart.shape[:3], -1)
    found = []
    for block in (torch_descent._torch_block, torch_descent._kernel_block):
        own, moved = codes.clone(), apart.clone()
        block(weights, product, tables, pull, trust, own, moved, pulled, columns)
        torch.testing.assert_close(moved, torch_descent.errors(weights, tables, own))
        found.append(own)
    assert (found[0] != codes).any()
    # Rounding may turn a decision between two codes that are as good, and then later ones.
    assert (found[0] == found[1]).float().mean() > 0.98
    beside = torch.ones(cols, dtype=torch.bool, device=CUDA)
    beside[columns] = False
    assert (found[1] == codes)[..., beside].all()


@pytest.mark.parametrize("seed_bits, top_bits", ((2, 6), (2, 2), (3, 4)))
def test_the_cluster_kernel_finds_the_bounds_of_tensor_operations(
    seed_bits: int, top_bits: int
) -> None:
    gen = torch.Generator(CUDA).manual_seed(1)
    weights = torch.randn((200, 700), generator=gen, device=CUDA).bfloat16().float()
    weights[0], weights[1] = 0.5, weights[1].sign()
    weights[2:50] = (weights[2:50] * 5).round()
    importance = torch.rand((1, 700), generator=gen, device=CUDA, dtype=torch.float64) + 0.01
    rows = torch_rows._sort(weights, importance)
    plain = torch_rows._torch_bounds(rows, seed_bits, top_bits)
    kernel = torch_rows._kernel_bounds(rows, seed_bits, top_bits)
    assert (plain == kernel).all(1).float().mean() > 0.95
    ends = rows.m.expand(-1, 1)
    assert (kernel[:, :1] == 0).all()
    assert (kernel[:, -1:] == ends).all()
    assert (kernel.diff(dim=1) >= 0).all()


def _text() -> CalibrationTokens:
    random = torch.Generator().manual_seed(3)
    said = {"text": "t", "sequences": "4", "sequence_length": "64", "seed": "0"}
    return CalibrationTokens(torch.randint(0, VOCAB, (4, 64), generator=random), said)


@pytest.mark.parametrize("codes", ("kmeans", "compensated"))
@pytest.mark.parametrize("arch", ("qwen2_moe", "mixtral"))
def test_a_checkpoint_made_on_the_gpu_is_as_good(tmp_path: Path, arch: str, codes: str) -> None:
    source = SourceCheckpoint.open(make_checkpoint(tmp_path / "source", arch=arch, layers=2))
    errors = []
    for device in ("cpu", "cuda"):
        options = QuantizeOptions(calibration=_text(), device=device, codes=codes)  # type: ignore[arg-type]
        result = quantize_checkpoint(source, tmp_path / device, options, lambda *_: None)
        errors.append(result.error.sum((0, 1)))
    np.testing.assert_allclose(errors[1], errors[0], rtol=0.03 if codes == "compensated" else 1e-3)
    made = Checkpoint.open(tmp_path / "cuda")
    assert made.verify() == []
    for kind in KINDS:
        weights = source.expert(1, 1, kind).float()
        apart = made.dequantize(1, 1, kind, 6).float() - weights
        assert float(apart.square().sum() / weights.square().sum()) < 0.01


def test_calibration_on_the_gpu_measures_what_the_cpu_does(tmp_path: Path) -> None:
    source = SourceCheckpoint.open(make_checkpoint(tmp_path / "source", arch="mixtral", layers=2))
    quantize_checkpoint(source, tmp_path / "out", QuantizeOptions(), lambda *_: None)
    checkpoint = Checkpoint.open(tmp_path / "out")
    cpu, gpu = (
        measure(
            source,
            checkpoint,
            _text().tokens,
            MeasureOptions(labels="text", device=device),
            tmp_path,
            lambda *_: None,
        )
        for device in ("cpu", "cuda")
    )
    assert gpu.perplexity == pytest.approx(cpu.perplexity, rel=1e-4)
    for name, array in cpu.arrays.items():
        np.testing.assert_allclose(gpu.arrays[name], array, rtol=2e-3, atol=1e-6 * abs(array).max())
    np.testing.assert_allclose(
        gpu.measurements.damage.sum(1), cpu.measurements.damage.sum(1), rtol=2e-3, atol=1e-12
    )
