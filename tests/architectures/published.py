"""Configs of published models, as far as they decide expert and KV bytes, and what their model
cards say, written down by hand.

`expert_weights`: weights in routed experts, in billions (the card's total is a little more).
`kv_bytes`: of one token with 16-bit values, all layers. `moe_layers`: how many have experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """`config` as far as it matters here, bfloat16 throughout."""

    config: dict[str, Any]
    moe_layers: int
    expert_weights: float
    kv_bytes: int

    def __post_init__(self) -> None:
        self.config["torch_dtype"] = "bfloat16"


def _qwen(model_type: str, **numbers: Any) -> dict[str, Any]:
    rest = {"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []}
    return {"model_type": model_type, **rest, "tie_word_embeddings": False, **numbers}


def _deepseek(model_type: str, **numbers: Any) -> dict[str, Any]:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    rest = {"hidden_act": "silu", "moe_layer_freq": 1, "tie_word_embeddings": False}
    return {"model_type": model_type, **rest, **latent, "v_head_dim": 128, **numbers}


def _granite(**numbers: Any) -> dict[str, Any]:
    rest = {"hidden_act": "silu", "tie_word_embeddings": True, "num_key_value_heads": 8}
    return {"model_type": "granitemoe", **rest, "num_experts_per_tok": 8, **numbers}


PUBLISHED = {
    "Qwen1.5-MoE-A2.7B": Published(
        _qwen("qwen2_moe", hidden_size=2048, num_hidden_layers=24, num_attention_heads=16,
              num_key_value_heads=16, num_experts=60, num_experts_per_tok=4,
              moe_intermediate_size=1408, intermediate_size=5632,
              shared_expert_intermediate_size=5632, vocab_size=151936),
        24, 12.457, 24 * 16 * 128 * 4,
    ),
    "Qwen2-57B-A14B": Published(
        _qwen("qwen2_moe", hidden_size=3584, num_hidden_layers=28, num_attention_heads=28,
              num_key_value_heads=4, num_experts=64, num_experts_per_tok=8,
              moe_intermediate_size=2560, intermediate_size=18944,
              shared_expert_intermediate_size=20480, vocab_size=151936),
        28, 49.325, 28 * 4 * 128 * 4,
    ),
    "Qwen3-30B-A3B": Published(
        _qwen("qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
              num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
              moe_intermediate_size=768, intermediate_size=6144, vocab_size=151936),
        48, 28.991, 48 * 4 * 128 * 4,
    ),
    "Qwen3-235B-A22B": Published(
        _qwen("qwen3_moe", hidden_size=4096, num_hidden_layers=94, num_attention_heads=64,
              num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
              moe_intermediate_size=1536, intermediate_size=12288, vocab_size=151936),
        94, 227.096, 94 * 4 * 128 * 4,
    ),
    "Mixtral-8x7B": Published(
        {"model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
         "num_experts_per_tok": 2, "intermediate_size": 14336, "hidden_act": "silu",
         "sliding_window": None, "vocab_size": 32000, "tie_word_embeddings": False},
        32, 45.097, 131072,
    ),
    "Mixtral-8x22B": Published(
        {"model_type": "mixtral", "hidden_size": 6144, "num_hidden_layers": 56,
         "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 8,
         "num_experts_per_tok": 2, "intermediate_size": 16384, "hidden_act": "silu",
         "sliding_window": None, "vocab_size": 32768, "tie_word_embeddings": False},
        56, 135.291, 56 * 8 * 128 * 4,
    ),
    "OLMoE-1B-7B": Published(
        {"model_type": "olmoe", "hidden_size": 2048, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64,
         "num_experts_per_tok": 8, "intermediate_size": 1024, "hidden_act": "silu",
         "vocab_size": 50304, "tie_word_embeddings": False},
        16, 6.442, 16 * 16 * 128 * 4,
    ),
    "gemma-4-26B-A4B": Published(
        {"model_type": "gemma4", "tie_word_embeddings": True, "text_config": {
            "model_type": "gemma4_text", "hidden_size": 2816, "num_hidden_layers": 30,
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704, "intermediate_size": 2112, "sliding_window": 1024,
            "hidden_activation": "gelu_pytorch_tanh", "vocab_size": 262144,
            "hidden_size_per_layer_input": 0,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5}},
        30, 22.838, 25 * 8 * 256 * 4 + 5 * 2 * 512 * 4,
    ),
    "DeepSeek-V2-Lite": Published(
        _deepseek("deepseek_v2", hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
                  num_key_value_heads=16, n_routed_experts=64, n_shared_experts=2,
                  num_experts_per_tok=6, moe_intermediate_size=1408, intermediate_size=10944,
                  first_k_dense_replace=1, q_lora_rank=None, vocab_size=102400),
        26, 14.395, 27 * 576 * 2,
    ),
    "DeepSeek-V2": Published(
        _deepseek("deepseek_v2", hidden_size=5120, num_hidden_layers=60, num_attention_heads=128,
                  num_key_value_heads=128, n_routed_experts=160, n_shared_experts=2,
                  num_experts_per_tok=6, moe_intermediate_size=1536, intermediate_size=12288,
                  first_k_dense_replace=1, q_lora_rank=1536, n_group=8, topk_group=3,
                  vocab_size=102400),
        59, 222.717, 60 * 576 * 2,
    ),
    "DeepSeek-V3": Published(
        _deepseek("deepseek_v3", hidden_size=7168, num_hidden_layers=61, num_attention_heads=128,
                  num_key_value_heads=128, n_routed_experts=256, n_shared_experts=1,
                  num_experts_per_tok=8, moe_intermediate_size=2048, intermediate_size=18432,
                  first_k_dense_replace=3, q_lora_rank=1536, n_group=8, topk_group=4,
                  num_nextn_predict_layers=1, vocab_size=129280),
        58, 653.909, 61 * 576 * 2,
    ),
    "Moonlight-16B-A3B": Published(
        _deepseek("deepseek_v3", hidden_size=2048, num_hidden_layers=27, num_attention_heads=16,
                  num_key_value_heads=16, n_routed_experts=64, n_shared_experts=2,
                  num_experts_per_tok=6, moe_intermediate_size=1408, intermediate_size=11264,
                  first_k_dense_replace=1, q_lora_rank=None, n_group=1, topk_group=1,
                  num_nextn_predict_layers=0, vocab_size=163840),
        26, 14.395, 27 * 576 * 2,
    ),
    "Phi-3.5-MoE": Published(
        {"model_type": "phimoe", "hidden_size": 4096, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 16,
         "num_experts_per_tok": 2, "intermediate_size": 6400, "hidden_act": "silu",
         "vocab_size": 32064, "tie_word_embeddings": False},
        32, 40.265, 131072,
    ),
    "granite-3.0-1b-a400m": Published(
        _granite(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                 num_local_experts=32, intermediate_size=512, vocab_size=49155),
        24, 1.208, 24 * 8 * 64 * 4,
    ),
    "granite-3.0-3b-a800m": Published(
        _granite(hidden_size=1536, num_hidden_layers=32, num_attention_heads=24,
                 num_local_experts=40, intermediate_size=512, vocab_size=49155),
        32, 3.020, 32 * 8 * 64 * 4,
    ),
}  # fmt: skip
