"""What vLLM's MoE layer would add to an expert's two products is refused, never left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedweight.errors import UserError

pytestmark = pytest.mark.vllm


def method_of(**special: Any) -> Any:
    """Our method for a layer as vLLM describes it."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )

    from pagedweight.serving.moe_method import PagedWeightMoEMethod

    activation = MoEActivation(special.pop("activation", "silu"))
    config = FusedMoEConfig(
        num_experts=6,
        experts_per_token=2,
        hidden_dim=96,
        intermediate_size=72,
        num_local_experts=6,
        num_logical_experts=6,
        activation=activation,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        **special,
    )
    return PagedWeightMoEMethod(config, "model.layers.3.mlp.experts")


def test_a_layer_of_two_products_is_taken():
    assert method_of().decoder_layer == 3
    assert method_of(activation="gelu_tanh").activation == "gelu_tanh"


@pytest.mark.parametrize("special", [{"has_bias": True}, {"swiglu_limit": 7.0}])
def test_biases_and_clamps_are_refused(special):
    with pytest.raises(UserError, match=r"model\.layers\.3\.mlp\.experts: experts with biases or"):
        method_of(**special)


def test_another_activation_is_refused():
    with pytest.raises(UserError, match="activation 'swigluoai' is not supported"):
        method_of(activation="swigluoai")
