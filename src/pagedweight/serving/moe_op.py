"""The kernel as one opaque torch operator, so that Dynamo does not trace into it."""

from __future__ import annotations

import torch

from pagedweight.serving.state import LayerState

_LAYERS: list[LayerState] = []


def register_layer(state: LayerState) -> int:
    """Make a layer known to the operator; returns the handle to call it with."""
    _LAYERS.append(state)
    return len(_LAYERS) - 1


def layer_state(handle: int) -> LayerState:
    """The layer that `register_layer` gave `handle` for."""
    return _LAYERS[handle]


@torch.library.custom_op("pagedweight::routed_experts", mutates_args=())
def routed_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, handle: int
) -> torch.Tensor:
    """[T, H] activations and [T, k] routing to the routed experts' sum [T, H]."""
    state = _LAYERS[handle]
    out = torch.empty_like(x)
    state.kernel(
        x.contiguous(),
        topk_weights.to(torch.float32).contiguous(),
        topk_ids.contiguous(),
        state.shape,
        state.table,
        state.table_dtype,
        state.activation,
        out,
        stats=state.stats,
        num_tokens=state.num_tokens,
    )
    return out


@routed_experts.register_fake
def _(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, handle: int
) -> torch.Tensor:
    return torch.empty_like(x)
