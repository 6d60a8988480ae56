"""Which tensors are routed experts, by architecture: one table, read by everything.

Names and config keys are those of the published checkpoints and of the transformers classes of the
same model type. Every family is stored in one of two layouts: one tensor for each expert and
projection, or 3-D tensors that hold all experts of a layer (gate rows, then up rows).
`docs/architectures.md` says what is tested of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pagedweight.checkpoint.architecture import (
    ACTIVATIONS,
    NEVER,
    PREFIXES,
    Architecture,
    ExpertTensor,
    KVLayer,
    ModelFacts,
    text_config,
    value,
)
from pagedweight.errors import CheckpointError, listing

__all__ = [
    "ACTIVATIONS", "ARCHITECTURES", "LOOKS_LIKE_EXPERT", "NEVER", "PREFIXES", "REFUSED",
    "Architecture", "ExpertTensor", "KVLayer", "ModelFacts", "architecture_of", "text_config",
    "value",
]  # fmt: skip

LOOKS_LIKE_EXPERT = re.compile(r"(^|\.)experts\.")

_DEEPSEEK: dict[str, Any] = {
    "containers": ("mlp.experts",),
    "experts": ("n_routed_experts", "num_experts"),
    "first_dense_layers": "first_k_dense_replace",
    "layer_frequency": "moe_layer_freq",
    "latent_kv": ("kv_lora_rank", "qk_rope_head_dim"),
}
_MIXTRAL_NAMES = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))

ARCHITECTURES = (
    Architecture(
        model_types=("qwen2_moe",),
        containers=("mlp.experts",),
        dense_layers="mlp_only_layers",
        sparse_step="decoder_sparse_step",
    ),
    Architecture(
        model_types=("qwen3_moe",),
        containers=("mlp.experts",),
        dense_layers="mlp_only_layers",
        sparse_step="decoder_sparse_step",
    ),
    Architecture(
        model_types=("mixtral",),
        containers=("block_sparse_moe.experts", "mlp.experts"),
        projections=_MIXTRAL_NAMES,
        renamed=(("block_sparse_moe.", "mlp."),),
        intermediate=("intermediate_size",),
    ),
    Architecture(
        model_types=("olmoe",),
        containers=("mlp.experts",),
        intermediate=("intermediate_size",),
    ),
    Architecture(
        model_types=("gemma4", "gemma4_text"),
        containers=("experts", "moe", "moe.experts"),
        intermediate=("moe_intermediate_size", "expert_intermediate_size"),
        top_k=("top_k_experts", "num_experts_per_tok"),
        activation=("hidden_activation", "hidden_act"),
        enabled="enable_moe_block",
        wide_kv=("global_head_dim", "num_global_key_value_heads"),
        tied=True,
    ),
    Architecture(model_types=("deepseek_v2",), **_DEEPSEEK),
    Architecture(
        model_types=("deepseek_v3",), prediction_layers="num_nextn_predict_layers", **_DEEPSEEK
    ),
    Architecture(
        model_types=("phimoe",),
        containers=("block_sparse_moe.experts", "mlp.experts"),
        projections=_MIXTRAL_NAMES,
        renamed=(("block_sparse_moe.gate.", "mlp.router."), ("block_sparse_moe.", "mlp.")),
        intermediate=("intermediate_size",),
    ),
    Architecture(
        model_types=("granitemoe",),
        containers=("block_sparse_moe", "block_sparse_moe.experts"),
        fused=(("input_linear", "output_linear"), ("gate_up_proj", "down_proj")),
        renamed=(("block_sparse_moe.router.layer.", "block_sparse_moe.router."),),
        intermediate=("intermediate_size",),
    ),
)

REFUSED = {
    "gpt_oss": "its experts have biases and a clamped SwiGLU, which the kernels do not compute, "
    "and its published weights have 4 bits already (MXFP4)",
    "llama4": "its routing weights multiply the experts' input, and the kernels apply them to the "
    "output",
    "llama4_text": "its routing weights multiply the experts' input, and the kernels apply them to "
    "the output",
}
"""MoE families that cannot be served from planes as they are, and why."""

_EXPERT_COUNTS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
)  # fmt: skip


def _counts_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config says how many experts there are, at the top or one level below (DBRX)."""
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    return any(part.get(key) for part in parts for key in _EXPERT_COUNTS)


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The table's row for a config.json; raises CheckpointError with the supported list."""
    found = config.get("model_type")
    for architecture in ARCHITECTURES:
        if found in architecture.model_types:
            return architecture
    supported = f"supported are {listing((a.name for a in ARCHITECTURES), limit=99)}"
    if found in REFUSED:
        raise CheckpointError(
            f"model_type {found!r} is not supported: {REFUSED[found]}; {supported}"
        )
    if found and not _counts_experts(config):
        raise CheckpointError(
            f"model_type {found!r} looks like a dense model: its config.json counts no experts, "
            f"and only the routed experts of MoE models are paged; {supported}"
        )
    raise CheckpointError(f"model_type {found!r} is not supported; {supported}")
