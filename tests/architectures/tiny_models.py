"""A tiny model of every supported family: the structure of the published ones, made from the
family's own transformers config class, random weights from a seed, saved as its publishers save.

Everything is awkward on purpose: 6, 7 or 12 experts are no power of two, a hidden size of 160 and
expert widths of 72 to 328 no multiples of 64; two ranks get 64 and 8 columns of 72, 4 and 3 of 7
experts. Head sizes are those that vLLM's CPU attention takes.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
_LATENT = {  # 512 + 64 is what vLLM's CPU kernel for latent attention is compiled for
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 128},
}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """`family`: prefix of the transformers classes. `special`: what differs from COMMON.
    `published`: what the publishers' config.json says and transformers' does not. `moe_layers`:
    decoder layers that must have experts. `width`: of an expert."""

    family: str
    special: dict[str, Any]
    experts: int = 6
    width: int = 72
    published: dict[str, Any] = field(default_factory=dict)
    moe_layers: tuple[int, ...] = (0, 1, 2)


MODELS = {
    # Without renormalized routing, with shared expert, QKV biases, one dense layer.
    "qwen2_moe": TinyModel(
        "Qwen2Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 72,
         "intermediate_size": 136, "shared_expert_intermediate_size": 136, "norm_topk_prob": False,
         "mlp_only_layers": [1]},
        moe_layers=(0, 2),
    ),
    # Renormalized routing, norms on queries and keys, tied embeddings.
    "qwen3_moe": TinyModel(
        "Qwen3Moe",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 200, "head_dim": 64,
         "intermediate_size": 136, "norm_topk_prob": True, "tie_word_embeddings": True},
        experts=7,
        width=200,
    ),
    "mixtral": TinyModel(
        "Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 72}
    ),
    # Without renormalized routing, norms over the whole width of queries and keys.
    "olmoe": TinyModel(
        "Olmoe",
        {"num_experts": 6, "num_experts_per_tok": 4, "intermediate_size": 72,
         "num_key_value_heads": 2, "norm_topk_prob": False},
    ),
    # GELU, a scale for each expert, experts beside a dense MLP, sliding and full attention.
    "gemma4": TinyModel(
        "Gemma4",
        {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 72, "head_dim": 32,
         "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "intermediate_size": 136, "enable_moe_block": True, "hidden_size_per_layer_input": 0,
         "num_kv_shared_layers": 0, "sliding_window": 16, "tie_word_embeddings": True,
         "vocab_size_per_layer_input": 8192, "final_logit_softcapping": 30.0,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    # Latent attention, first layer dense, two shared experts, experts in groups, scaled routing.
    "deepseek_v2": TinyModel(
        "DeepseekV2",
        {**_LATENT, "n_routed_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 328,
         "intermediate_size": 136, "first_k_dense_replace": 1, "n_shared_experts": 2,
         "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
         "norm_topk_prob": False, "routed_scaling_factor": 2.0},
        published={"scoring_func": "softmax", "moe_layer_freq": 1},
        moe_layers=(1, 2),
        experts=12,
        width=328,
    ),
    # Sigmoid routing with a correction bias that chooses but does not weigh, renormalized.
    "deepseek_v3": TinyModel(
        "DeepseekV3",
        {**_LATENT, "n_routed_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 328,
         "intermediate_size": 136, "first_k_dense_replace": 1, "n_shared_experts": 1,
         "q_lora_rank": 48, "n_group": 3, "topk_group": 2, "norm_topk_prob": True,
         "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0},
        published={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        moe_layers=(1, 2),
        experts=12,
        width=328,
    ),
    # Sparse mixing, layer norms and linear layers with biases, a head with one (0: vLLM 0.32 reads
    # it and does not add it).
    "phimoe": TinyModel(
        "Phimoe",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 72,
         "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.01},
        published={"architectures": ["PhiMoEForCausalLM"]},
    ),
    # 3-D tensors input_linear and output_linear, multipliers everywhere, tied embeddings.
    "granitemoe": TinyModel(
        "GraniteMoe",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 104,
         "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
         "logits_scaling": 2.0, "tie_word_embeddings": True},
        width=104,
    ),
}  # fmt: skip


def tiny_config(name: str) -> Any:
    """transformers' config of a tiny model."""
    import transformers

    model = MODELS[name]
    suffix = "TextConfig" if name == "gemma4" else "Config"
    return getattr(transformers, f"{model.family}{suffix}")(**{**COMMON, **model.special})


def tiny_model(name: str) -> Any:
    """Random weights that keep activations near 1 and let routing, biases and norms matter."""
    import transformers

    torch.manual_seed(sorted(MODELS).index(name))
    model = getattr(transformers, f"{MODELS[name].family}ForCausalLM")(tiny_config(name))
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            _fill(key, tensor)
    return model.to(torch.bfloat16).eval()


def _fill(key: str, tensor: torch.Tensor) -> None:
    if key.endswith("layer_scalar"):
        tensor.fill_(0.8)
    elif key == "lm_head.bias":
        tensor.zero_()
    elif key.endswith("e_score_correction_bias"):
        tensor.normal_(std=0.3)
    elif tensor.ndim == 1:
        tensor.normal_(std=0.1).add_(0 if key.endswith("bias") else 1)
    elif "embed_tokens" in key:
        tensor.normal_()
    else:
        tensor.normal_(std=1.5 * tensor.shape[-1] ** -0.5)


def save_tiny(name: str, folder: Path, tokenizer: Path) -> Path:
    """The model's folder as its publishers would upload it, with tiny-moe's tokenizer."""
    tiny_model(name).save_pretrained(folder)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **MODELS[name].published}
    path.write_text(json.dumps(config, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    return folder
