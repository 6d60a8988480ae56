"""Source to checkpoint: right weights and sizes, nothing half done, resumed to the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from factory import VOCAB, make_checkpoint, make_faulty
from pagedweight.calibrate.stream import StreamedMoments
from pagedweight.calibrate.text import CalibrationTokens
from pagedweight.checkpoint.layerbuffer import LayerBuffer
from pagedweight.checkpoint.layout import predicted_bytes
from pagedweight.checkpoint.manifest import CALIBRATION, MANIFEST
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.core.geometry import KINDS, LayerShape
from pagedweight.errors import CheckpointError, UserError
from pagedweight.quantize import layer as layer_module
from pagedweight.quantize.compensated import compensate
from pagedweight.quantize.layer import PRIOR_TOKENS, fitting_importance
from pagedweight.quantize.pipeline import QuantizeOptions, QuantizeResult, quantize_checkpoint
from pagedweight.quantize.rows import quantize_rows

METADATA = {"text": "t", "sequences": "3", "sequence_length": "16", "seed": "0"}


def tokens(vocabulary: int = VOCAB) -> CalibrationTokens:
    random = torch.Generator().manual_seed(3)
    return CalibrationTokens(torch.randint(0, vocabulary, (3, 16), generator=random), METADATA)


def quantize(source: Path, out: Path, **options) -> QuantizeResult:
    opened = SourceCheckpoint.open(source)
    return quantize_checkpoint(opened, out, QuantizeOptions(**options), lambda *_: None)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    "arch, layout, calibrated",
    (
        ("qwen2_moe", "per_expert", True),
        ("mixtral", "per_expert", True),
        ("qwen3_moe", "fused", True),
        ("gemma4", "fused", True),
        ("olmoe", "per_expert", False),
    ),
)
def test_every_block_is_the_quantized_source(
    tmp_path: Path, arch: str, layout: str, calibrated: bool
) -> None:
    path = make_checkpoint(tmp_path / "source", arch=arch, layout=layout, layers=2)
    options = {"calibration": tokens(), "codes": "kmeans"} if calibrated else {}
    result = quantize(path, tmp_path / "out", **options)
    source, written = SourceCheckpoint.open(path), Checkpoint.open(tmp_path / "out")
    assert written.verify() == []
    measured = written.calibration()
    assert (measured.tokens.sum(1) == (3 * 16 * source.top_k if calibrated else 0)).all()
    assert measured.metadata["text"] == ("t" if calibrated else "none")
    np.testing.assert_array_equal(measured.error, result.error)
    for position in range(2):
        for expert in range(source.shape.experts):
            for at, kind in enumerate(KINDS):
                weights = source.expert(position, expert, kind).float()
                h = torch.from_numpy(measured.second_moment[kind][position, expert].copy())
                errors = measured.error[position, expert, at]
                for b, error in zip(written.bits, errors, strict=True):
                    apart = weights - written.dequantize(position, expert, kind, b)
                    assert float((h * apart**2).sum()) == pytest.approx(error, rel=1e-4)
                fitted = fitting_importance(h.numpy(), measured.tokens[position, expert])
                seed = quantize_rows(weights, fitted, (2,), measure=h).error[0]
                assert errors[0] == pytest.approx(seed, rel=1e-6)


def test_few_tokens_count_little() -> None:
    h = np.float32([1, 3, 0, 4])
    np.testing.assert_allclose(fitting_importance(h, 0), 2)
    np.testing.assert_allclose(fitting_importance(h, PRIOR_TOKENS), (h + 2) / 2)
    np.testing.assert_allclose(fitting_importance(h, 10**9), h, atol=1e-5)


def test_calibration_changes_where_precision_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weighing by E[x^2] must win by its own measure: without a prior it minimizes it."""
    monkeypatch.setattr(layer_module, "PRIOR_TOKENS", 1e-9)
    path = make_checkpoint(tmp_path / "source", hidden=64, intermediate=64, layers=1)
    quantize(path, tmp_path / "with", calibration=tokens(), codes="kmeans")
    quantize(path, tmp_path / "without")
    source = SourceCheckpoint.open(path)
    informed, uniform = Checkpoint.open(tmp_path / "with"), Checkpoint.open(tmp_path / "without")
    moments = informed.calibration().second_moment["down"][0]
    for expert in range(4):
        weights = source.expert(0, expert, "down").float()
        apart = [
            float((torch.from_numpy(moments[expert]) * (w - weights) ** 2).sum())
            for w in (c.dequantize(0, expert, "down", 2) for c in (informed, uniform))
        ]
        assert apart[0] < apart[1]


def test_compensated_codes_are_the_default_with_a_calibration_and_lose_less(
    tmp_path: Path,
) -> None:
    """`error` is tr(dW H dW^T) of what was written, and below that of plain codes at each level."""
    path = make_checkpoint(tmp_path / "source", layers=2)
    result = quantize(path, tmp_path / "out", calibration=tokens())
    quantize(path, tmp_path / "plain", calibration=tokens(), codes="kmeans")
    written, plain = Checkpoint.open(tmp_path / "out"), Checkpoint.open(tmp_path / "plain")
    measured = written.calibration()
    assert measured.metadata["codes"] == "compensated"
    assert plain.calibration().metadata["codes"] == "kmeans"
    assert result.plain_kept is not None
    assert result.plain_kept.shape == (2, 4, 2)
    assert result.plain_kept.mean() < 0.5
    source = SourceCheckpoint.open(path)
    streamed = StreamedMoments(source, tokens().tokens, torch.device("cpu"), tmp_path, True)
    for layer in range(2):
        moments, read = streamed.advance(layer)
        for expert in range(4):
            for at, kind in enumerate(KINDS):
                weights, product = read(expert, kind).float(), moments.product[kind][expert]
                diagonal = moments.second_moment[kind][expert]
                np.testing.assert_allclose(product.diagonal(), diagonal, rtol=1e-4)
                losses = []
                for b in written.bits:
                    apart = [
                        c.dequantize(layer, expert, kind, b) - weights for c in (written, plain)
                    ]
                    losses.append([float(((d @ product) * d).sum()) for d in apart])
                ours, theirs = np.array(losses).T
                np.testing.assert_allclose(measured.error[layer, expert, at], ours, rtol=1e-3)
                assert (ours <= theirs * 1.001).all()
                assert (result.plain_kept[layer, expert, at] == 1) == (ours == theirs).all()


def test_compensated_codes_need_a_calibration(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1)
    with pytest.raises(UserError, match="--calibration"):
        quantize(source, tmp_path / "out", codes="compensated")
    assert not (tmp_path / "out").exists()
    assert quantize(source, tmp_path / "out").plain_kept is None


def test_bytes_on_disk_are_the_predicted_ones(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "source", shards=2, experts=5, intermediate=40)
    quantize(path, tmp_path / "out", bits=(2, 3, 4), calibration=tokens())
    predicted = predicted_bytes(SourceCheckpoint.open(path), (2, 3, 4))
    found = {name: len(data) for name, data in contents(tmp_path / "out").items()}
    assert found.keys() == predicted.keys()
    inexact = {MANIFEST, CALIBRATION}  # unseen experts and metadata are not known before
    assert {n: s for n, s in found.items() if n not in inexact} == {
        n: s for n, s in predicted.items() if n not in inexact
    }
    assert all(abs(found[name] - predicted[name]) < 1024 for name in inexact)


def test_unseen_experts_fall_back_to_uniform_and_are_reported(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "source", experts=16, top_k=1, layers=1)
    few = CalibrationTokens(torch.tensor([[5, 5, 5]]), METADATA)
    result = quantize(path, tmp_path / "out", calibration=few)
    written = Checkpoint.open(tmp_path / "out")
    assert 13 <= len(result.unseen) < 16
    assert list(written.manifest.unseen_experts) == result.unseen
    measured = written.calibration()
    for _, expert in result.unseen:
        assert (measured.second_moment["gate_up"][0, expert] == 1).all()
        assert (measured.second_moment["down"][0, expert] == 1).all()
        assert (measured.error[0, expert] > 0).all()
    assert measured.mass.sum() == pytest.approx(1)


@pytest.mark.parametrize("stop", (0, 9, 23))
@pytest.mark.parametrize("calibrated", (True, False))
def test_an_interrupted_run_resumes_to_the_same_bytes(
    tmp_path: Path, stop: int, calibrated: bool
) -> None:
    source = make_checkpoint(tmp_path / "source", layers=3)  # 24 linear blocks
    options = {"calibration": tokens() if calibrated else None, "bits": (2, 3)}
    quantize(source, tmp_path / "whole", **options)
    left = [stop]

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "layers" and done:
            left[0] -= done
            if left[0] < 0:
                raise KeyboardInterrupt

    opened, out = SourceCheckpoint.open(source), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(opened, out, QuantizeOptions(**options), interrupt)
    with pytest.raises(CheckpointError, match="--resume"):
        Checkpoint.open(out)
    with pytest.raises(UserError, match="--resume"):
        quantize(source, out, **options)
    quantize(source, out, resume=True, **options)
    assert contents(out) == contents(tmp_path / "whole")


def test_resume_goes_on_where_it_stopped(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", layers=3)
    out, left = tmp_path / "out", [20]

    def interrupt(stage: str, done: int, total: int) -> None:
        left[0] -= done if stage == "layers" else 0
        if left[0] <= 0:
            raise KeyboardInterrupt

    opened = SourceCheckpoint.open(source)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(opened, out, QuantizeOptions(), interrupt)
    kept = (out / "experts/layer-00001.safetensors").stat().st_mtime_ns
    steps: list[tuple[str, int]] = []
    quantize_checkpoint(
        opened, out, QuantizeOptions(resume=True), lambda stage, n, _: steps.append((stage, n))
    )
    assert [n for stage, n in steps if stage == "layers"] == [16] + [1] * 8
    assert not [stage for stage, _ in steps if stage == "check"]
    assert (out / "experts/layer-00001.safetensors").stat().st_mtime_ns == kept


def test_resume_with_other_options_is_refused(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", layers=1), tmp_path / "out"

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "copy":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(SourceCheckpoint.open(source), out, QuantizeOptions(), stop)
    with pytest.raises(UserError, match="text was none, is t"):
        quantize(source, out, resume=True, calibration=tokens())
    with pytest.raises(UserError, match="bits"):
        quantize(source, out, resume=True, bits=(2, 3))


def test_resume_with_other_codes_is_refused(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", layers=1), tmp_path / "out"

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "copy":
            raise KeyboardInterrupt

    options = {"calibration": tokens(), "codes": "kmeans"}
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(SourceCheckpoint.open(source), out, QuantizeOptions(**options), stop)
    with pytest.raises(UserError, match="codes was kmeans, is compensated"):
        quantize(source, out, resume=True, calibration=tokens())


@pytest.mark.parametrize(
    "dtype, expected", ((torch.float32, "bfloat16"), (torch.float16, "float16"))
)
def test_tables_have_the_sources_type(tmp_path: Path, dtype: torch.dtype, expected: str) -> None:
    source = make_checkpoint(tmp_path / "source", layers=1, dtype=dtype)
    quantize(source, tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").table_dtype == expected


@pytest.mark.parametrize("fault", ("nan", "inf"))
def test_values_that_are_not_finite_stop_before_anything_is_written(
    tmp_path: Path, fault: str
) -> None:
    source = make_faulty(tmp_path / "source", fault)
    with pytest.raises(CheckpointError, match=fault):
        quantize(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_beyond_the_table_type_stop_before_anything_is_written(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = make_checkpoint(tmp_path / "source", layers=1)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.experts.3.down_proj.weight"][2, 5] = 1e5
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layer 0 expert 3 down \(99840\)"):
        quantize(source, tmp_path / "out", table_dtype="float16")
    assert not (tmp_path / "out").exists()
    quantize(source, tmp_path / "out", table_dtype="bfloat16")


def test_an_occupied_folder_is_left_alone(tmp_path: Path) -> None:
    source, out = make_checkpoint(tmp_path / "source", layers=1), tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    for resume in (False, True):
        with pytest.raises(UserError, match="not an empty folder"):
            quantize(source, out, resume=resume)
    assert contents(out) == {"thesis.tex": b"mine"}
    quantize(source, tmp_path / "done")
    with pytest.raises(UserError, match="finished"):
        quantize(source, tmp_path / "done", resume=True)


@pytest.mark.parametrize("device, message", (("tpu", "cpu or cuda"), ("cuda", "no CUDA device")))
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, device: str, message: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    source = make_checkpoint(tmp_path / "source", layers=1)
    with pytest.raises(UserError, match=message):
        quantize(source, tmp_path / "out", device=device)
    assert not (tmp_path / "out").exists()


def test_codes_that_stay_on_a_device_are_packed_to_the_same_words() -> None:
    """As a GPU makes them: a tensor; rows and columns are no whole tiles."""
    shape = LayerShape(experts=1, hidden=80, intermediate=24)
    weights = torch.randn((48, 80), generator=torch.Generator().manual_seed(1))
    rows = quantize_rows(weights, None, (2, 3))
    buffers = [LayerBuffer(shape, (2, 3)) for _ in range(2)]
    for buffer, codes in zip(buffers, (rows.codes, torch.as_tensor(rows.codes)), strict=True):
        layer_module._put(buffer, 0, "gate_up", replace(rows, codes=codes))
    assert (buffers[0].planes["gate_up"] == buffers[1].planes["gate_up"]).all()
    assert buffers[0].planes["gate_up"].any()


def test_compensation_takes_codes_from_either_place() -> None:
    gen = torch.Generator().manual_seed(2)
    weights = torch.randn((1, 16, 40), generator=gen)
    inputs = torch.randn((300, 3), generator=gen) @ torch.randn((3, 40), generator=gen)
    product = (inputs.T @ inputs / 300)[None]
    rows = quantize_rows(weights[0], product[0].diagonal(), (2, 3))
    found = [
        compensate(weights, product, [300], [start], "bfloat16", "torch")[0]
        for start in (rows, replace(rows, codes=torch.as_tensor(rows.codes)))
    ]
    np.testing.assert_array_equal(found[0].rows.codes, found[1].rows.codes)
