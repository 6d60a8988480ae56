"""The writer: byte-identical copies, exact predictions, refusals, and runs killed at any file."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from factory import make_checkpoint, make_faulty
from faults import FAULTS
from pagedweight.checkpoint import layout, tensorfile
from pagedweight.checkpoint.manifest import MANIFEST, PARTIAL
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.checkpoint.writer import CheckpointWriter
from pagedweight.errors import CheckpointError, UserError
from quantized import METADATA, flat_calibration, make_quantized, random_layer

BITS = (2, 3, 4)


@pytest.fixture
def source(tmp_path):
    return SourceCheckpoint.open(make_checkpoint(tmp_path / "model", shards=2, hidden=32))


def quantize(out: Path, source: SourceCheckpoint, resume: bool = False, **options) -> list[int]:
    """A whole run with random codes; returns the layers that it had to write."""
    writer = CheckpointWriter(out, source, BITS, resume=resume, **options)
    writer.copy_plain()
    left = sorted(set(range(len(source.moe_layers))) - set(writer.done_layers()))
    for pos in left:
        layer = random_layer(source.shape, BITS, seed=pos)
        writer.write_layer(pos, layer.codes, layer.tables, {"note": np.full(3, pos, np.float32)})
    notes = [int(writer.measured(pos)["note"][0]) for pos in range(len(source.moe_layers))]
    assert notes == list(range(len(source.moe_layers)))
    writer.finish(flat_calibration(source.shape, len(source.moe_layers), len(BITS)), METADATA)
    return left


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("arch", ["qwen2_moe", "mixtral", "gemma4"])
@pytest.mark.parametrize("tied", [False, True])
def test_everything_but_experts_is_copied_byte_for_byte(tmp_path, arch, tied):
    model = make_checkpoint(tmp_path / "model", arch=arch, shards=3, tied=tied, layers=2)
    source = SourceCheckpoint.open(model)
    quantize(tmp_path / "out", source)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == list(source.plain_names())
    assert ("lm_head.weight" in index["weight_map"]) == (not tied)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as copied:
            assert copied.metadata() == {"format": "pt"}
            mine = copied.get_tensor(name)
        theirs = source.read(name)
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "pagedweight"
    assert config == json.loads((model / "config.json").read_text())


def test_a_duplicate_of_a_tied_head_is_kept(tmp_path):
    source = SourceCheckpoint.open(make_faulty(tmp_path / "model", "tied_head_duplicate"))
    quantize(tmp_path / "out", source)
    assert "lm_head.weight" in source.plain_names()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(index["weight_map"])


@pytest.mark.parametrize("options", [{}, {"hidden": 40, "intermediate": 24, "layout": "fused"}])
def test_predicted_bytes_equal_the_disk(tmp_path, options):
    source = SourceCheckpoint.open(make_checkpoint(tmp_path / "model", shards=2, **options))
    predicted = layout.predicted_bytes(source, BITS)
    quantize(tmp_path / "out", source)
    disk = {name: len(data) for name, data in contents(tmp_path / "out").items()}
    assert disk.keys() == predicted.keys()
    headers = {MANIFEST: 512, "experts/calibration.safetensors": 512}
    for name, size in disk.items():
        assert abs(size - predicted[name]) <= headers.get(name, 0), name


def test_predicted_table_and_plane_bytes_follow_the_format(tmp_path, source):
    shape, layer = source.shape, layout.layer_file(0)
    weights = sum(
        shape.experts * (4 * b.plane_bytes + sum(b.table_bytes(n) for n in BITS))
        for b in shape.blocks
    )
    header = layout.predicted_bytes(source, BITS)[layer] - weights
    assert 0 < header < 1024
    assert header % tensorfile.ALIGNMENT == 0


def test_large_models_are_cut_into_shards(tmp_path, source, monkeypatch):
    monkeypatch.setattr(layout, "SHARD_BYTES", 20_000)
    quantize(tmp_path / "out", source)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [path.name for path in shards]
    for path in shards:
        tensors = tensorfile.TensorFile.open(path).tensors.values()
        assert len(tensors) == 1 or sum(t.entry.nbytes for t in tensors) <= 20_000
    Checkpoint.open(tmp_path / "out")


def test_copying_holds_a_piece_of_a_tensor_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "CHUNK_BYTES", 4096)
    source = SourceCheckpoint.open(make_checkpoint(tmp_path / "model", hidden=512, experts=2))
    writer = CheckpointWriter(tmp_path / "out", source, BITS)
    writer.copy_plain()  # imports and caches come first
    for path in (tmp_path / "out").glob("model-*"):
        path.unlink()
    tracemalloc.start()
    writer.copy_plain()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest = max(source.nbytes(name) for name in source.plain_names())
    assert peak < largest / 4, "file buffers, headers and one piece, not a tensor"


@pytest.mark.parametrize("fault", [n for n, f in FAULTS.items() if f.stage != "never"])
def test_a_bad_source_leaves_the_output_untouched(tmp_path, fault):
    model = make_faulty(tmp_path / "model", fault)

    def begin() -> None:
        opened = SourceCheckpoint.open(model)
        opened.check_values()
        CheckpointWriter(tmp_path / "out", opened, BITS)

    with pytest.raises(CheckpointError):
        begin()
    assert not (tmp_path / "out").exists()


def _with_file(out: Path) -> None:
    out.mkdir()
    (out / "notes.txt").write_text("mine")


def test_other_peoples_folders_are_refused(tmp_path, source):
    out = tmp_path / "out"
    _with_file(out)
    for resume in (False, True):
        with pytest.raises(UserError, match="not empty"):
            CheckpointWriter(out, source, BITS, resume=resume)
    assert contents(out) == {"notes.txt": b"mine"}
    with pytest.raises(UserError, match="is a file"):
        CheckpointWriter(out / "notes.txt", source, BITS)
    with pytest.raises(UserError, match="not empty"):
        CheckpointWriter(source.path, source, BITS, resume=True)


def test_an_empty_folder_is_fine_and_a_finished_one_is_not(tmp_path, source):
    (tmp_path / "out").mkdir()
    quantize(tmp_path / "out", source)
    with pytest.raises(UserError, match="already holds a finished"):
        CheckpointWriter(tmp_path / "out", source, BITS, resume=True)


@pytest.mark.parametrize("bits", [(), (2, 4), (4, 3), (1, 2), (7, 8, 9), (3, 3)])
def test_levels_that_cannot_be_stored(tmp_path, source, bits):
    with pytest.raises(UserError, match="--bits"):
        CheckpointWriter(tmp_path / "out", source, bits)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_said_before_writing(tmp_path, source, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda place: usage)
    with pytest.raises(UserError, match="1,000 free"):
        CheckpointWriter(tmp_path / "out", source, BITS)
    assert not (tmp_path / "out").exists()


def test_resume_only_with_the_same_source_and_options(tmp_path, source):
    out, options = tmp_path / "out", {"calibration": "abc", "seed": "0"}
    CheckpointWriter(out, source, BITS, options=options)
    before = contents(out)
    other = SourceCheckpoint.open(make_checkpoint(tmp_path / "b", shards=2, hidden=32, seed=9))
    for arguments, says in (
        ((source, (2, 3)), r"bits was \[2, 3, 4\], is \[2, 3\]"),
        ((source, BITS, "float16"), "table_dtype was bfloat16, is float16"),
        ((other, BITS), "source was"),
    ):
        with pytest.raises(UserError, match=says):
            CheckpointWriter(out, *arguments, resume=True, options=options)
    with pytest.raises(UserError, match="calibration was abc, is xyz; seed was 0, is None"):
        CheckpointWriter(out, source, BITS, resume=True, options={"calibration": "xyz"})
    with pytest.raises(UserError, match="go on with --resume"):
        CheckpointWriter(out, source, BITS, options=options)
    assert contents(out) == before
    CheckpointWriter(out, source, BITS, resume=True, options=options)


def _killed_at(step: int, out: Path, source: SourceCheckpoint) -> bool:
    """Run in a child that dies, as by SIGKILL, when it is about to rename its file number `step`.

    Returns False when the run ended before that.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    renamed = 0

    def replace(self: Path, target: Path) -> Path:
        nonlocal renamed
        if renamed == step:
            os._exit(9)
        renamed += 1
        os.replace(self, target)
        return target

    Path.replace = replace  # type: ignore[method-assign]
    try:
        quantize(out, source)
    finally:
        os._exit(0)


def test_resume_after_a_kill_at_any_file(tmp_path, source):
    quantize(tmp_path / "whole", source)
    whole, kills, left = contents(tmp_path / "whole"), 0, []
    while _killed_at(kills, out := tmp_path / f"out-{kills}", source):
        with pytest.raises(CheckpointError, match="unfinished"):
            Checkpoint.open(out)
        left.append(len(quantize(out, source, resume=True)))
        assert contents(out) == whole
        kills += 1
    assert contents(out) == whole
    # Each of the whole's files, one note a layer and the options were killed once.
    assert kills == len(whole) + 3 + 1
    assert sorted(set(left)) == [0, 1, 2, 3]
    assert left == sorted(left, reverse=True)


def test_a_damaged_layer_is_written_again(tmp_path, source):
    out = tmp_path / "out"
    writer = CheckpointWriter(out, source, BITS)
    layer = random_layer(source.shape, BITS, seed=0)
    for pos in range(3):
        writer.write_layer(pos, layer.codes, layer.tables)
    path = out / layout.layer_file(1)
    path.write_bytes(path.read_bytes()[:-1])
    assert CheckpointWriter(out, source, BITS, resume=True).done_layers() == [0, 2]


def test_incomplete_or_infinite_layers_are_not_written(tmp_path, source):
    writer = CheckpointWriter(tmp_path / "out", source, BITS)
    layer = random_layer(source.shape, BITS, seed=0)
    buffer = writer.buffer()
    for expert in range(3):
        for kind in ("gate_up", "down"):
            tables = {b: layer.tables[kind][b][expert] for b in BITS}
            buffer.put(expert, kind, layer.codes[kind][expert], tables)
    with pytest.raises(ValueError, match="expert 3 down, expert 3 gate_up"):
        writer.write_buffer(0, buffer)
    layer.tables["down"][3][2, 5, 7] = 0x7F80  # infinity in bfloat16
    with pytest.raises(ValueError, match="down table of level 3"):
        writer.write_layer(0, layer.codes, layer.tables)
    assert writer.done_layers() == []
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_finish_needs_every_layer_and_a_sound_calibration(tmp_path, source):
    writer = CheckpointWriter(tmp_path / "out", source, BITS)
    calibration = flat_calibration(source.shape, 3, len(BITS))
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2\]"):
        writer.finish(calibration, METADATA)
    broken = {**calibration, "mass": calibration["mass"].astype(np.float64) * 2}
    del broken["error"]
    with pytest.raises(CheckpointError, match=r"error is missing; mass is F64"):
        writer.finish(broken, METADATA)
    with pytest.raises(CheckpointError, match="metadata lacks seed"):
        writer.finish(calibration, {k: v for k, v in METADATA.items() if k != "seed"})
    calibration["error"][1, 2, 0, 1] = np.nan
    with pytest.raises(CheckpointError, match=r"error\[1, 2, 0, 1\] is nan"):
        writer.finish(calibration, METADATA)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_fused_and_per_expert_sources_become_the_same_checkpoint(tmp_path):
    files = []
    for form in ("per_expert", "fused"):
        out = tmp_path / form
        make_quantized(out, bits=BITS, layout=form)
        found = contents(out)
        files.append({n: d for n, d in found.items() if n != MANIFEST})
        assert not (out / PARTIAL).exists()
    assert files[0] == files[1]


def test_optional_measurements_come_back_and_unknown_ones_are_ignored(tmp_path, source):
    writer = CheckpointWriter(tmp_path / "out", source, BITS)
    writer.copy_plain()
    for pos in range(3):
        layer = random_layer(source.shape, BITS, seed=pos)
        writer.write_layer(pos, layer.codes, layer.tables)
    calibration = flat_calibration(source.shape, 3, len(BITS))
    calibration["sensitivity"] = calibration["error"] * 7
    calibration["residual.weights"] = np.array([[-1.5, 2.0]], np.float32)
    calibration["weather"] = np.ones(2, np.float32)
    writer.finish(calibration, METADATA)
    read = Checkpoint.open(tmp_path / "out").calibration()
    assert np.array_equal(read.damage(), calibration["sensitivity"])
    assert {n: a.tolist() for n, a in read.residual.items()} == {"residual.weights": [[-1.5, 2.0]]}
    assert read.metadata == METADATA
    for kind in ("gate_up", "down"):
        assert np.array_equal(read.second_moment[kind], calibration[f"second_moment.{kind}"])
