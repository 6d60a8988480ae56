"""Sources: every fault named before any work, the same weights in every layout and name variant."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from factory import ARCHS, make_checkpoint, make_faulty
from faults import FAULTS
from pagedweight.calibrate.experts import read_block
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.core.geometry import KINDS, LayerShape
from pagedweight.errors import CheckpointError

AT = {stage: [n for n, f in FAULTS.items() if f.stage == stage] for stage in ("open", "values")}


def says(error: pytest.ExceptionInfo[CheckpointError], fault: str) -> None:
    message = str(error.value)
    assert "\n" not in message
    for words in FAULTS[fault].says:
        assert words in message, f"{message!r} does not name {words!r}"


@pytest.mark.parametrize("fault", AT["open"])
def test_refused_from_headers(tmp_path, fault, monkeypatch):
    path = make_faulty(tmp_path / "model", fault)

    def read(*args, **kwargs):
        raise AssertionError("a weight was read")

    monkeypatch.setattr("pagedweight.checkpoint.tensorfile.TensorFile.read", read)
    with pytest.raises(CheckpointError) as error:
        SourceCheckpoint.open(path)
    says(error, fault)


@pytest.mark.parametrize("fault", AT["values"])
def test_refused_from_values(tmp_path, fault):
    source = SourceCheckpoint.open(make_faulty(tmp_path / "model", fault))
    with pytest.raises(CheckpointError) as error:
        source.check_values()
    says(error, fault)


@pytest.mark.parametrize("fault", [n for n, f in FAULTS.items() if f.stage == "never"])
def test_odd_but_good(tmp_path, fault):
    SourceCheckpoint.open(make_faulty(tmp_path / "model", fault)).check_values()


def test_every_case_is_covered():
    assert {fault.case for fault in FAULTS.values()} == set(range(1, 12))


def test_all_nan_tensors_are_listed(tmp_path):
    path = make_checkpoint(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    bad = [n for n in tensors if n.endswith("experts.2.up_proj.weight")]
    for name in bad:
        tensors[name][-1, -1] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        SourceCheckpoint.open(path).check_values()
    assert all(f"{name}[47, 63] is nan" in str(error.value) for name in bad)


def test_infinite_bounds_pass_and_nan_bounds_do_not(tmp_path):
    """Gemma 4 stores the clipping range of a linear layer as scalars, infinite when unused."""
    path = make_checkpoint(tmp_path / "model", arch="gemma4", layout="fused")
    tensors = load_file(path / "model.safetensors")
    tensors["model.vision_tower.q_proj.input_min"] = torch.tensor(-float("inf"))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    SourceCheckpoint.open(path).check_values()
    tensors["model.vision_tower.q_proj.input_min"] = torch.tensor(float("nan"))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"input_min\[\] is nan"):
        SourceCheckpoint.open(path).check_values()


def test_progress_reaches_the_total(tmp_path):
    source = SourceCheckpoint.open(make_checkpoint(tmp_path / "model", shards=2))
    done = []
    source.check_values(done.append)
    assert sum(done) == source.total_bytes > 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_shape_and_weights_of_every_family(tmp_path, arch, layout):
    path = make_checkpoint(tmp_path / "model", arch=arch, layout=layout, shards=2)
    source = SourceCheckpoint.open(path)
    assert source.shape == LayerShape(experts=4, hidden=64, intermediate=48)
    assert source.moe_layers == (0, 1, 2)
    assert source.top_k == 2
    assert source.activation == ("gelu_tanh" if arch.startswith("gemma4") else "silu")
    assert source.dtype == torch.bfloat16
    assert source.table_dtype == "bfloat16"
    expert = source.expert(2, 3, "gate_up"), source.expert(2, 3, "down")
    # The factory draws the same numbers for both layouts; the per-expert one is read apart here.
    plain = make_checkpoint(tmp_path / "plain", arch=arch)
    tensors = load_file(plain / "model.safetensors")
    names = [n for n in tensors if re.search(r"layers\.2\..*experts\.3\.", n)]
    gate, up, down = (tensors[n] for n in sorted(names, key=_role))
    assert torch.equal(expert[0], torch.cat([gate, up]))
    assert torch.equal(expert[1], down)


def _role(name: str) -> int:
    return ["gate_proj", "w1", "up_proj", "w3", "down_proj", "w2"].index(name.split(".")[-2])


@pytest.mark.parametrize("hidden, intermediate", [(64, 48), (64, 32), (64, 64)])
def test_transposed_fused_tensors(tmp_path, hidden, intermediate):
    """H = 2I makes gate_up square and H = I makes down square; the other one decides."""
    options = {"hidden": hidden, "intermediate": intermediate, "layout": "fused"}
    plain = SourceCheckpoint.open(make_checkpoint(tmp_path / "plain", **options))
    turned = SourceCheckpoint.open(make_checkpoint(tmp_path / "turned", transposed=True, **options))
    for kind in ("gate_up", "down"):
        assert torch.equal(plain.expert(1, 2, kind), turned.expert(1, 2, kind))


@pytest.mark.parametrize(
    "arch, layout, options",
    [
        ("gemma4", "fused", {"container": "moe"}),
        ("gemma4", "per_expert", {"container": "moe.experts"}),
        ("gemma4", "fused", {"prefix": "language_model.model."}),
        ("qwen3_moe", "fused", {"prefix": "language_model."}),
        ("mixtral", "fused", {"container": "block_sparse_moe.experts"}),
    ],
)
def test_name_variants(tmp_path, arch, layout, options):
    usual = SourceCheckpoint.open(make_checkpoint(tmp_path / "usual", arch=arch, layout=layout))
    other = SourceCheckpoint.open(
        make_checkpoint(tmp_path / "other", arch=arch, layout=layout, **options)
    )
    assert other.experts.names.isdisjoint(usual.experts.names)
    assert len(other.plain_names()) == len(usual.plain_names())
    for kind in ("gate_up", "down"):
        assert torch.equal(usual.expert(0, 1, kind), other.expert(0, 1, kind))


def test_dense_layers_are_left_alone(tmp_path):
    source = SourceCheckpoint.open(make_checkpoint(tmp_path / "model", layers=4, dense=(0, 2)))
    assert source.moe_layers == (1, 3)
    assert "model.layers.2.mlp.gate_proj.weight" in source.plain_names()


def test_reads_equal_the_safetensors_package(tmp_path):
    path = make_checkpoint(tmp_path / "model", dtype=torch.float16)
    source = SourceCheckpoint.open(path)
    with safe_open(path / "model.safetensors", "pt") as theirs:
        assert sorted(source.files) == sorted(theirs.keys())
        for name in source.files:
            assert torch.equal(source.read(name), theirs.get_tensor(name))
    assert source.table_dtype == "float16"


def test_float32_sources_get_bfloat16_tables(tmp_path):
    source = SourceCheckpoint.open(make_checkpoint(tmp_path / "model", dtype=torch.float32))
    assert (source.dtype, source.table_dtype) == (torch.float32, "bfloat16")
    assert source.layer_bytes == 4 * 3 * 64 * 48 * 4


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda path: None, "is not a folder"),
        (lambda path: path.mkdir(), "config.json is missing"),
    ],
)
def test_no_checkpoint_at_all(tmp_path, make, says):
    make(tmp_path / "model")
    with pytest.raises(CheckpointError, match=says):
        SourceCheckpoint.open(tmp_path / "model")


def test_consolidated_copies_are_ignored_and_others_are_not(tmp_path):
    path = make_checkpoint(tmp_path / "model")
    data = (path / "model.safetensors").read_bytes()
    (path / "consolidated.safetensors").write_bytes(data)
    SourceCheckpoint.open(path)
    (path / "adapter.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"2 weight files.*adapter\.safetensors"):
        SourceCheckpoint.open(path)


def test_trained_model(tiny_moe):
    source = SourceCheckpoint.open(tiny_moe)
    assert source.shape == LayerShape(16, 256, 256)
    assert source.tied
    assert source.plain_names()[0] == "model.embed_tokens.weight"


def test_trained_sharded_model(lab_moe):
    source = SourceCheckpoint.open(lab_moe)
    assert source.shape == LayerShape(12, 640, 512)
    assert source.layer_bytes == 12 * 3 * 640 * 512 * 2
    source.check_values()


@pytest.mark.parametrize("layout", ("per_expert", "fused", "transposed"))
@pytest.mark.parametrize("piece", (1000, 1 << 20))
def test_an_expert_is_the_same_through_a_staging_buffer(tmp_path, layout, piece):
    """Pieces end inside of rows and of values; gate and up are two tensors or one."""
    arch = "qwen2_moe" if layout == "per_expert" else "qwen3_moe"
    turned = layout == "transposed"
    layout = "fused" if turned else layout
    path = make_checkpoint(tmp_path / "m", arch=arch, layout=layout, transposed=turned)
    source = SourceCheckpoint.open(path)
    assert source.experts.transposed == turned
    staging = torch.empty(piece + 1, dtype=torch.uint8)
    for kind in KINDS:
        wanted = source.expert(1, 2, kind)
        found = torch.full_like(wanted, float("nan"))
        source.copy_expert(1, 2, kind, found, staging)
        assert torch.equal(found, wanted)
        assert torch.equal(read_block(source, 1, (2, kind), torch.device("cpu"), staging), wanted)
