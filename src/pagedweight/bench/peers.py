"""What the kernels are measured beside: vLLM's fused MoE on bfloat16 and on Marlin's int4.

Called as vLLM's own experts call them (`TritonExperts`, `MarlinExperts`). Tested with vLLM 0.26.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pagedweight.bench.layers import ModelShape, Tokens


@dataclass(frozen=True)
class Bf16Layer:
    """Random weights for vLLM's Triton kernels: gate_up [E, 2I, H] and down [E, H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: Any

    @staticmethod
    def make(model: ModelShape, gen: torch.Generator) -> Bf16Layer:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        e, h, i = model.layer.experts, model.layer.hidden, model.layer.intermediate
        sizes = ((e, 2 * i, h), (e, h, i))
        weights = (torch.empty(s, dtype=torch.bfloat16, device=gen.device) for s in sizes)
        gate_up, down = (w.normal_(std=w.shape[2] ** -0.5, generator=gen) for w in weights)
        return Bf16Layer(gate_up, down, MoEActivation(model.activation))

    def __call__(self, t: Tokens) -> None:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        fused_experts(t.x, self.gate_up, self.down, t.weights, t.ids, self.activation)


@dataclass(frozen=True)
class MarlinLayer:
    """Random 4-bit weights in Marlin's packing, with a scale for every 128 (or 64) inputs."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scale: torch.Tensor
    down_scale: torch.Tensor
    activation: Any

    @staticmethod
    def make(model: ModelShape, gen: torch.Generator) -> MarlinLayer:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation

        e, h, i = model.layer.experts, model.layer.hidden, model.layer.intermediate
        packed, scales = [], []
        for rows, cols in ((2 * i, h), (h, i)):
            size = (e, cols // 16, rows * 2)
            packed.append(_random_int32(size, gen))
            group = 128 if cols % 128 == 0 else 64
            scale = torch.full((e, cols // group, rows), cols**-0.5 / 8, device=gen.device)
            scales.append(scale.to(torch.bfloat16))
        return MarlinLayer(*packed, *scales, MoEActivation(model.activation))

    def __call__(self, t: Tokens) -> None:
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        weights = (self.gate_up, self.down, None, None, self.gate_up_scale, self.down_scale)
        quantized = scalar_types.uint4b8.id
        args = (t.weights, t.ids, quantized)
        fused_marlin_moe(
            t.x,
            *weights,
            *args,
            activation=self.activation,
            moe_sum=_sum_over_choices,
            output=t.out,
        )


def _sum_over_choices(parts: torch.Tensor, out: torch.Tensor, *_: Any) -> None:
    from vllm import _custom_ops as ops

    ops.moe_sum(parts, out)


def _random_int32(size: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    low, high = -(2**31), 2**31
    return torch.randint(low, high, size, dtype=torch.int32, device=gen.device, generator=gen)


PEERS = {"marlin_int4": MarlinLayer.make, "bf16": Bf16Layer.make}
