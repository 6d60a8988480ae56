"""Whatever a family's experts are called and however they are laid out, the planes are the same."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, save_tiny
from variants import variants_of, write_variant

from pagedweight.checkpoint.manifest import layer_file
from pagedweight.checkpoint.names import ARCHITECTURES, NEVER, architecture_of
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.core.geometry import LayerShape
from pagedweight.errors import CheckpointError
from pagedweight.quantize.pipeline import QuantizeOptions, quantize_checkpoint

BITS = (2, 3)


@pytest.fixture(scope="module", params=MODELS)
def tiny(request, tmp_path_factory, tiny_moe):
    """(name, source) of a tiny model as transformers saves it."""
    folder = tmp_path_factory.mktemp("tiny") / request.param
    return request.param, SourceCheckpoint.open(save_tiny(request.param, folder, tiny_moe))


def test_every_row_of_the_table_has_a_tiny_model():
    assert set(MODELS) == {architecture.name for architecture in ARCHITECTURES}


def test_structure_of_the_real_config_class(tiny):
    name, source = tiny
    model = MODELS[name]
    assert source.architecture.name == name
    assert source.moe_layers == model.moe_layers
    assert source.shape == LayerShape(model.experts, 160, model.width)
    kept = source.plain_names()
    assert not [n for n in source.experts.names if NEVER.search(n)]
    assert [n for n in kept if "gate." in n or "router." in n]
    if name.startswith("deepseek"):
        assert [n for n in kept if "shared_experts.down_proj" in n]
    if name == "deepseek_v3":
        assert [n for n in kept if n.endswith("gate.e_score_correction_bias")]
    assert any(n.startswith("lm_head.") for n in kept) != source.tied


def test_every_variant_holds_the_same_experts(tiny, tmp_path):
    _, source = tiny
    for number, variant in enumerate(variants_of(source.architecture)):
        again = SourceCheckpoint.open(write_variant(source, variant, tmp_path / str(number)))
        assert again.architecture is source.architecture, variant
        assert again.moe_layers == source.moe_layers, variant
        assert len(again.plain_names()) == len(source.plain_names()), variant
        for position in range(len(source.moe_layers)):
            for expert in range(source.shape.experts):
                for kind in ("gate_up", "down"):
                    mine, theirs = (s.expert(position, expert, kind) for s in (source, again))
                    assert torch.equal(mine, theirs), (variant, position, expert, kind)


def test_one_by_one_and_fused_give_identical_planes(tiny, tmp_path):
    _, source = tiny
    by_layout = {len(v.names): v for v in variants_of(source.architecture) if not v.transposed}
    assert sorted(by_layout) == [2, 3]
    files = []
    for variant in by_layout.values():
        folder, out = tmp_path / f"s{len(files)}", tmp_path / f"q{len(files)}"
        again = SourceCheckpoint.open(write_variant(source, variant, folder))
        quantize_checkpoint(again, out, QuantizeOptions(bits=BITS), lambda *_: None)
        files.append([(out / layer_file(layer)).read_bytes() for layer in source.moe_layers])
    assert files[0] == files[1]


def test_experts_of_prediction_layers_are_copied_as_they_are(tiny_moe, tmp_path):
    """DeepSeek-V3 stores a layer for multi-token prediction after the last: not served."""
    folder = save_tiny("deepseek_v3", tmp_path / "model", tiny_moe)
    tensors = load_file(folder / "model.safetensors")
    extra = {
        n.replace("layers.2.", "layers.3."): t.clone()
        for n, t in tensors.items()
        if "layers.2." in n
    }
    save_file({**tensors, **extra}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"36 expert tensors too many: model\.layers\.3\."):
        SourceCheckpoint.open(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    source = SourceCheckpoint.open(folder)
    assert source.moe_layers == (1, 2)
    assert set(extra) <= set(source.plain_names())


def test_a_refused_family_is_refused_before_its_weights_are_read(tmp_path):
    """gpt-oss is published in MXFP4: the reason is the family, not that it is quantized."""
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"biases and a clamped SwiGLU.*supported are qwen2"):
        SourceCheckpoint.open(tmp_path)


def test_weights_in_eight_bits_are_to_be_converted_first(tmp_path):
    """DeepSeek-V3 is published in fp8."""
    config = {"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert architecture_of(config).name == "deepseek_v3"
    with pytest.raises(CheckpointError, match=r"already quantized \(fp8\)"):
        SourceCheckpoint.open(tmp_path)
