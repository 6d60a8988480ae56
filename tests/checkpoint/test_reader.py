"""The reader: what comes out is what went in, and every broken folder is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.checkpoint.layerbuffer import LayerBuffer
from pagedweight.checkpoint.manifest import MANIFEST, PARTIAL
from pagedweight.checkpoint.packing import unpack, unpad_tables
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import KINDS, LayerShape
from pagedweight.errors import CheckpointError
from quantized import make_quantized, random_layer

BITS = (2, 3, 4, 5)
LAYER = "experts/layer-00001.safetensors"


@pytest.fixture
def made(tmp_path):
    return make_quantized(tmp_path / "out", bits=BITS, layers=3, dense=(0,), unseen=[(1, 3)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_round_trip(tmp_path, dtype):
    checkpoint, layers = make_quantized(
        tmp_path / "out", bits=BITS, hidden=72, intermediate=40, dtype=dtype, layers=2
    )
    assert checkpoint.table_dtype == str(dtype).removeprefix("torch.")
    for pos, layer in enumerate(layers):
        for kind in KINDS:
            for expert in range(4):
                for bits in BITS:
                    weights = layer.weights(expert, kind, bits, dtype)
                    assert torch.equal(
                        checkpoint.dequantize(pos, expert, kind, bits, dtype), weights
                    )
    assert checkpoint.dequantize(0, 0, "down", 2).dtype == torch.float32


def test_views_are_mapped_aligned_and_read_only(made):
    checkpoint, layers = made
    views = checkpoint.layer(1)
    for kind, block in zip(KINDS, checkpoint.shape.blocks, strict=True):
        planes = views.planes[kind]
        assert planes.dtype == np.uint32
        assert planes.shape == (5, 4, block.row_tiles, block.col_tiles, 32)
        assert np.array_equal(unpack(planes, block), layers[1].codes[kind])
        assert sorted(views.tables[kind]) == list(BITS)
        for bits, table in views.tables[kind].items():
            assert np.array_equal(unpad_tables(table, block), layers[1].tables[kind][bits])
        for array in (planes, *views.tables[kind].values()):
            assert not array.flags.writeable
            assert not array.flags.owndata
            assert array.ctypes.data % 128 == 0


def test_facts(made):
    checkpoint, _ = made
    assert checkpoint.shape == LayerShape(4, 64, 48)
    assert checkpoint.bits == BITS
    assert checkpoint.moe_layers == (1, 2)
    assert checkpoint.position(2) == 1
    assert (checkpoint.activation, checkpoint.top_k) == ("silu", 2)
    assert checkpoint.manifest.unseen_experts == ((2, 3),)
    calibration = checkpoint.calibration()
    assert calibration.unseen == [(1, 3)]
    assert np.array_equal(calibration.damage()[0, 0, 0], 10 * np.linspace(4, 1, 4, dtype="f4"))
    assert not calibration.damage()[1, 3].any()
    with pytest.raises(CheckpointError, match="layer 0"):
        checkpoint.position(0)
    with pytest.raises(CheckpointError, match="2 to 5 bits, not 6"):
        checkpoint.dequantize(0, 0, "down", 6)


@settings(max_examples=20, deadline=None)
@given(
    hidden=st.integers(1, 140),
    intermediate=st.integers(1, 140),
    seed=st.integers(0, 99),
    low=st.integers(2, 8),
)
def test_packing_a_layer_block_by_block(hidden, intermediate, seed, low):
    """Any widths and levels: planes and tables in the buffer give codes and tables back."""
    shape, bits = LayerShape(2, hidden, intermediate), range(low, min(low + 2, 8) + 1)
    layer, buffer = random_layer(shape, bits, seed), LayerBuffer(shape, bits)
    for kind, block in zip(KINDS, shape.blocks, strict=True):
        for expert in range(2):
            tables = {b: layer.tables[kind][b][expert] for b in bits}
            buffer.put(expert, kind, layer.codes[kind][expert], tables)
        assert np.array_equal(unpack(buffer.planes[kind], block), layer.codes[kind])
        for b in bits:
            padded = buffer.tables[kind][b]
            assert np.array_equal(unpad_tables(padded, block), layer.tables[kind][b])
            assert np.count_nonzero(padded) == np.count_nonzero(layer.tables[kind][b])
    assert sum(piece.nbytes for piece in buffer.data("bfloat16")) == 2 * sum(
        max(bits) * block.plane_bytes + sum(block.table_bytes(b) for b in bits)
        for block in shape.blocks
    )


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def retype(path: Path) -> None:
    """Another type of the same size in the header: nothing but the reader's check can notice."""
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"I16" ', 1))


BROKEN = {
    "no manifest": (lambda out: (out / MANIFEST).unlink(), "not a pagedweight checkpoint"),
    "unfinished": (
        lambda out: ((out / MANIFEST).unlink(), (out / PARTIAL).mkdir()),
        "is unfinished",
    ),
    "newer version": (lambda out: edit(out / MANIFEST, format_version=2), r"version 2.*version 1"),
    "another format": (lambda out: edit(out / MANIFEST, format="gguf"), "'gguf'"),
    "no field": (lambda out: edit(out / MANIFEST, top_k=None), "'top_k'"),
    "odd field": (lambda out: edit(out / MANIFEST, hidden="wide"), "wrong form"),
    "gap in levels": (lambda out: edit(out / MANIFEST, bits=[2, 4]), "without gaps"),
    "layers out of order": (lambda out: edit(out / MANIFEST, moe_layers=[2, 1]), "ascending"),
    "a layer too many": (lambda out: edit(out / MANIFEST, moe_layers=[1, 2, 3]), "layer 3 of 3"),
    "other widths": (lambda out: edit(out / MANIFEST, hidden=128), r"gate_up\.planes is I32"),
    "config says otherwise": (
        lambda out: edit(out / "config.json", quantization_config=None),
        "no quantization_config",
    ),
    "layer gone": (lambda out: (out / LAYER).unlink(), LAYER),
    "layer short": (lambda out: shorten(out / LAYER), r"layer-00001.*instead of"),
    "layer of another type": (lambda out: retype(out / LAYER), r"table\.2 is I16"),
    "tokenizer gone": (lambda out: (out / "tokenizer_config.json").unlink(), "tokenizer_config"),
    "shard gone": (
        lambda out: (out / "model-00001-of-00001.safetensors").unlink(),
        "model-00001-of-00001",
    ),
    "a shard too many": (
        lambda out: (out / "model-00002-of-00002.safetensors").write_bytes(b"x"),
        "model-00002-of-00002",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused(tmp_path, made, case):
    change, says = BROKEN[case]
    change(tmp_path / "out")
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(tmp_path / "out")


def test_config_and_manifest_must_agree(tmp_path, made):
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["bits"] = [2, 3]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"bits is \[2, 3\], the manifest says \[2, 3, 4, 5\]"
    ):
        Checkpoint.open(tmp_path / "out")


def test_unknown_keys_and_edited_texts_are_accepted(tmp_path, made):
    edit(tmp_path / "out" / MANIFEST, colour="blue")
    (tmp_path / "out" / "tokenizer_config.json").write_text("{}")
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert checkpoint.verify() == ["tokenizer_config.json"]


def test_checksums_find_one_flipped_bit(tmp_path, made):
    checkpoint, _ = made
    done: list[int] = []
    assert checkpoint.verify(done.append) == []
    assert sum(done) == sum(f.bytes for f in checkpoint.manifest.files.values())
    data = bytearray((tmp_path / "out" / LAYER).read_bytes())
    data[-1000] ^= 1
    (tmp_path / "out" / LAYER).write_bytes(data)
    assert Checkpoint.open(tmp_path / "out").verify() == [LAYER]
