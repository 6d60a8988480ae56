"""The models that benchmarks name: config.json of the published checkpoints, in full size.

Facts of each model's own config.json; what it has beside the language model (towers for images and
sound) is left out.
"""

from __future__ import annotations

from typing import Any

_QWEN = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
}

_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GEMMA = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen1.5-moe": _QWEN,
    "mixtral": _MIXTRAL,
    "gemma-4": _GEMMA,
}
MODELS = tuple(_CONFIGS)


def model_config(name: str, layers: int | None = None, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of a model, with its first `layers` layers (None: all) and weights of `dtype`."""
    config = {**_CONFIGS[name], "dtype": dtype}
    if layers is not None:
        config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
    if name == "gemma-4":  # every sixth layer sees everything
        kinds = ("full_attention", "sliding_attention")
        depth = range(1, config["num_hidden_layers"] + 1)
        config["layer_types"] = [kinds[bool(n % 6)] for n in depth]
    return config
