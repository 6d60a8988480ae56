"""The table of names against what transformers itself expects, and the never-list."""

from __future__ import annotations

import pytest
import torch

from factory import ARCHS, make_checkpoint
from pagedweight.checkpoint.names import ARCHITECTURES, NEVER, architecture_of
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.errors import CheckpointError


@pytest.mark.parametrize("arch", ARCHS)
def test_factory_models_load_in_transformers(tmp_path, arch):
    """The factory's names are real: nothing missing, nothing unexpected, and the model runs."""
    from transformers import AutoModelForCausalLM

    layout = "fused" if arch.startswith("gemma4") else "per_expert"
    path = make_checkpoint(tmp_path / "model", arch=arch, layout=layout)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("layout", ["per_expert", "fused"])
def test_never_list_keeps_the_rest_apart(tmp_path, arch, layout):
    """Routers, shared experts, embeddings, heads, norms, attention are plain, experts are not."""
    source = SourceCheckpoint.open(make_checkpoint(tmp_path / "model", arch=arch, layout=layout))
    assert not [name for name in source.experts.names if NEVER.search(name)]
    kept = " ".join(source.plain_names())
    for part in ("embed_tokens", "lm_head", "norm", "self_attn"):
        assert part in kept
    assert "router.proj" in kept or ".gate.weight" in kept
    tensors = 3 * (4 * 3 if layout == "per_expert" else 2)
    assert len(source.experts.names) == tensors
    if arch == "qwen2_moe":
        assert "mlp.shared_expert.down_proj.weight" in kept
        assert "mlp.shared_expert_gate.weight" in kept


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.block_sparse_moe.gate.weight",
        "model.layers.3.mlp.shared_expert.gate_proj.weight",
        "model.layers.3.mlp.shared_experts.down_proj.weight",
        "model.layers.3.mlp.shared_expert_gate.weight",
        "model.layers.3.router.per_expert_scale",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.3.mlp.router.weight",
        "model.layers.3.block_sparse_moe.router.layer.weight",
        "model.layers.3.mlp.experts.gate_up_proj_bias",
        "model.layers.3.mlp.experts.gate_up_proj_blocks",
        "model.layers.3.mlp.experts.down_proj_scales",
        "model.layers.3.mlp.down_proj.weight",
        "model.layers.3.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.vision_tower.layers.0.mlp.experts.0.gate_proj.weight",
        "mtp.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.3.mlp.experts.0.gate_proj.qweight",
        "model.layers.3.mlp.experts.0.gate_proj.bias",
    ],
)
def test_no_family_takes_these_for_experts(name):
    assert not [a.name for a in ARCHITECTURES if a.parse(name)]


def test_sparse_step_and_dense_layers():
    qwen = architecture_of({"model_type": "qwen2_moe"})
    config = {"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert qwen.moe_layers(config) == (1, 5, 7)
    assert qwen.moe_layers({"num_hidden_layers": 2, "mlp_only_layers": None}) == (0, 1)


def test_switched_off_experts():
    gemma = architecture_of({"model_type": "gemma4"})
    assert gemma.moe_layers({"num_hidden_layers": 2, "enable_moe_block": False}) == ()


def test_model_types_are_unique_and_listed_when_refused():
    known = [t for a in ARCHITECTURES for t in a.model_types]
    assert len(known) == len(set(known))
    with pytest.raises(CheckpointError) as error:
        architecture_of({"model_type": "bert"})
    assert all(a.name in str(error.value) for a in ARCHITECTURES)
