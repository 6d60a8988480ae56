"""The layer-at-a-time forward is the model's own forward, on every supported architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pagedweight.calibrate import buffer as buffer_module
from pagedweight.calibrate.stream import StreamedMoments
from pagedweight.checkpoint.names import ARCHITECTURES
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.errors import CheckpointError

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "intermediate_size": 40, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 8,
         "intermediate_size": 40, "norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24,
         "sliding_window": 8},
    ),
    "olmoe": (
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "gemma4": (
        "Gemma4",
        {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24, "head_dim": 8,
         "global_head_dim": 16, "intermediate_size": 40, "enable_moe_block": True,
         "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "sliding_window": 8,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "intermediate_size": 40, "first_k_dense_replace": 1, "n_shared_experts": 2,
         "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8,
         "qk_rope_head_dim": 8, "v_head_dim": 8, "topk_method": "group_limited_greedy",
         "n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.0},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
         "intermediate_size": 40, "first_k_dense_replace": 1, "n_shared_experts": 1,
         "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8,
         "qk_rope_head_dim": 8, "v_head_dim": 8, "n_group": 3, "topk_group": 2},
    ),
    "phimoe": (
        "Phimoe",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24,
         "attention_bias": True, "lm_head_bias": True},
    ),
    "granitemoe": (
        "GraniteMoe",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 24,
         "embedding_multiplier": 12.0, "residual_multiplier": 0.3, "tie_word_embeddings": True},
    ),
}  # fmt: skip


def saved_model(name: str, folder: Path) -> Any:
    """A random model of the architecture, saved as its publishers would."""
    family, special = CONFIGS[name]
    torch.manual_seed(0)
    if name == "gemma4":
        config = transformers.Gemma4TextConfig(**{**COMMON, **special})
        model = transformers.Gemma4ForCausalLM(config)
    else:
        config = getattr(transformers, f"{family}Config")(**{**COMMON, **special})
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and scales too: none may go unnoticed
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for key, stored in model.state_dict().items():
            if key.endswith("layer_scalar"):
                stored.fill_(0.7)
            if key.endswith("e_score_correction_bias"):
                stored.normal_()
    model.save_pretrained(folder)
    return model.eval()


def test_every_architecture_is_here() -> None:
    assert set(CONFIGS) == {architecture.name for architecture in ARCHITECTURES}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_and_moments_are_the_models_own(name: str, tmp_path: Path) -> None:
    model = saved_model(name, tmp_path)
    source = SourceCheckpoint.open(tmp_path)
    tokens = torch.randint(0, 96, (3, 20), generator=torch.Generator().manual_seed(1))
    seen = record_experts(model)
    with torch.no_grad():
        states = model.model(tokens, output_hidden_states=True, use_cache=False).hidden_states
    streamed = StreamedMoments(source, tokens, torch.device("cpu"), tmp_path)
    for number in range(len(streamed.buffer)):
        torch.testing.assert_close(streamed.buffer.read(number), states[0][number])
    for layer in range(3):
        found = streamed.advance(layer)
        assert (found is None) == (layer not in source.moe_layers)
        if layer < 2:  # the last of transformers' states is after the final norm
            for number in range(3):
                torch.testing.assert_close(
                    streamed.buffer.read(number), states[layer + 1][number], rtol=1e-4, atol=1e-4
                )
        if found is not None:
            check_moments(found[0], *seen[layer])
            for kind in ("gate_up", "down"):
                position = source.moe_layers.index(layer)
                assert torch.equal(found[1](2, kind), source.expert(position, 2, kind))


def record_experts(model: Any) -> dict[int, tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """By layer: the experts' module and what it is called with, filled by the next forward."""
    seen = {}

    def hook_of(layer: int):
        def hook(module, args):
            seen[layer] = (module, *args)

        return hook

    for layer, block in enumerate(model.model.layers):
        for module in block.modules():
            weight = module._parameters.get("gate_up_proj")
            if weight is not None and weight.ndim == 3:
                module.register_forward_pre_hook(hook_of(layer))
    return seen


def check_moments(moments, experts, x, ids, weights) -> None:
    """Against the definition: loops over experts and tokens, float64."""
    total = float(weights.double().sum())
    for expert in range(experts.num_experts):
        token, choice = torch.where(ids == expert)
        assert moments.tokens[expert] == len(token)
        mass = float(weights[token, choice].double().sum()) / total
        assert moments.mass[expert] == pytest.approx(mass, rel=1e-4, abs=1e-7)
        if not len(token):
            assert (moments.second_moment["gate_up"][expert] == 1).all()
            assert (moments.second_moment["down"][expert] == 1).all()
            continue
        inputs = x[token].double()
        gate, up = (inputs @ experts.gate_up_proj[expert].double().T).chunk(2, dim=-1)
        inner = experts.act_fn(gate) * up
        for kind, values in (("gate_up", inputs), ("down", inner)):
            expected = (values**2).mean(0).detach().numpy()
            np.testing.assert_allclose(moments.second_moment[kind][expert], expected, rtol=2e-3)


def test_a_large_buffer_is_a_file_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_model("mixtral", tmp_path)
    source = SourceCheckpoint.open(tmp_path)
    tokens = torch.arange(40).reshape(2, 20)
    results = []
    for limit in (1 << 30, 0):
        monkeypatch.setattr(buffer_module, "IN_MEMORY_BYTES", limit)
        streamed = StreamedMoments(source, tokens, torch.device("cpu"), tmp_path)
        results.append([streamed.advance(layer)[0] for layer in range(3)])
    for memory, file in zip(*results, strict=True):
        assert (memory.second_moment["down"] == file.second_moment["down"]).all()
    assert not list(tmp_path.glob(".activations*"))


def test_layers_come_in_order(tmp_path: Path) -> None:
    saved_model("olmoe", tmp_path)
    source = SourceCheckpoint.open(tmp_path)
    streamed = StreamedMoments(source, torch.ones((1, 4), dtype=int), torch.device("cpu"), tmp_path)
    with pytest.raises(ValueError, match="0 is next"):
        streamed.advance(1)


def test_a_model_whose_layers_share_state_is_refused(tmp_path: Path) -> None:
    saved_model("gemma4", tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"num_kv_shared_layers": 0', '"num_kv_shared_layers": 1')
    )
    source = SourceCheckpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="num_kv_shared_layers is 1"):
        StreamedMoments(source, torch.ones((1, 4), dtype=int), torch.device("cpu"), tmp_path)
