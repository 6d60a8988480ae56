"""vLLM's MoE method: routed experts out of bit-planes, everything around them as vLLM has it.

The planes are not parameters of the model: no architecture's weight loader ever sees them. Each
layer fills its part of the process's expert store straight from the checkpoint folder.
Tested with vLLM 0.26 and 0.32. Relies on: FusedMoEMethodBase.{create_weights,
process_weights_after_loading, get_fused_moe_quant_config, apply}, FusedMoEConfig.{activation,
moe_parallel_config, experts_per_token}, RoutedExperts.{expert_map, global_num_experts,
apply_router_weight_on_input}, SchedulerConfig.max_num_batched_tokens,
envs.VLLM_DISABLE_SHARED_EXPERTS_STREAM.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEConfig, FusedMoEMethodBase
from vllm.model_executor.models.utils import extract_layer_index

from pagedweight.errors import UserError
from pagedweight.serving.kernel import warm_up
from pagedweight.serving.moe_op import layer_state, register_layer
from pagedweight.serving.parts import Part
from pagedweight.serving.plugin import announce
from pagedweight.serving.refusals import told
from pagedweight.serving.store import expert_store

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}


class PagedWeightMoEMethod(FusedMoEMethodBase):
    """Routed experts of one layer. Routing, shared experts and the all-reduce stay vLLM's."""

    def __init__(self, moe: FusedMoEConfig, prefix: str):
        super().__init__(moe)
        announce()
        self.decoder_layer = extract_layer_index(prefix)
        activation = moe.activation.value
        if activation not in _ACTIVATIONS:
            raise UserError(
                f"{prefix}: activation {activation!r} is not supported; "
                f"supported are {sorted(_ACTIVATIONS)}"
            )
        if getattr(moe, "has_bias", False) or getattr(moe, "swiglu_limit", None) is not None:
            raise UserError(
                f"{prefix}: experts with biases or a clamped SwiGLU are not supported; "
                f"the kernels compute neither"
            )
        self.activation = _ACTIVATIONS[activation]
        self.handle = -1
        self.dtype = torch.bfloat16
        self.most_tokens = 0

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition  # kernels take any width

    @told()
    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if layer.apply_router_weight_on_input:
            raise UserError("models that apply the router weight to the input are not supported")
        config = get_current_vllm_config()
        parallel = self.moe.moe_parallel_config
        experts = list(range(layer.global_num_experts))
        if layer.expert_map is not None:
            local = layer.expert_map.tolist()
            experts = sorted((e for e in experts if local[e] >= 0), key=lambda e: local[e])
        part = Part(tuple(experts), parallel.tp_rank, parallel.tp_size)
        store = expert_store(config)
        device = torch.get_default_device()
        state = store.load(self.decoder_layer, part, self.activation, device)
        if state.higher is not None and layer.expert_map is not None:
            raise UserError(
                "--plan dynamic-layer does not go with --enable-expert-parallel: each rank would "
                "choose by its own experts alone"
            )
        self.handle = register_layer(state)
        self.dtype, self.most_tokens = params_dtype, config.scheduler_config.max_num_batched_tokens

    @told()
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Planes are read as they are stored; a GPU compiles and takes its scratch memory now."""
        top_k = self.moe.experts_per_token
        warm_up(layer_state(self.handle), self.dtype, top_k, self.most_tokens)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        return None

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routed output [T, H], not yet reduced over ranks."""
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids.long()]
        beside = shared_experts is not None and not envs.VLLM_DISABLE_SHARED_EXPERTS_STREAM
        return torch.ops.pagedweight.routed_experts(x, topk_weights, topk_ids, self.handle, beside)
