"""The kernel as one opaque torch operator, so that Dynamo does not trace into it."""

from __future__ import annotations

import torch

from pagedweight.kernels.contract import BlockTable
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
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    handle: int,
    beside: bool = False,
) -> torch.Tensor:
    """[T, H] activations and [T, k] routing to the routed experts' sum [T, H]. beside: see
    `MoEKernel`."""
    state = _LAYERS[handle]
    x, weights, ids = x.contiguous(), topk_weights.to(torch.float32).contiguous(), topk_ids
    if state.higher is None:
        return _at_level(state, state.table, x, weights, ids, beside)
    chosen = state.higher.choose(x, weights, ids)[:, None]
    # An id below 0 is nobody's: each token is in one of the two sums and zero in the other.
    low = _at_level(state, state.table, x, weights, ids.masked_fill(chosen, -1), beside)
    high = _at_level(state, state.higher.table, x, weights, ids.masked_fill(~chosen, -1), beside)
    return low.add_(high)


def _at_level(
    state: LayerState,
    table: BlockTable,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    beside: bool,
) -> torch.Tensor:
    """One call of the layer's kernel through `table`."""
    out = torch.empty_like(x)
    state.kernel(
        x,
        topk_weights,
        topk_ids.contiguous(),
        state.shape,
        table,
        state.table_dtype,
        state.activation,
        out,
        stats=state.stats,
        num_tokens=state.num_tokens,
        beside=beside,
    )
    return out


@routed_experts.register_fake
def _(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    handle: int,
    beside: bool = False,
) -> torch.Tensor:
    return torch.empty_like(x)
