"""Which kernel serves a device type, and what it does once while a model loads."""

from __future__ import annotations

from functools import cache

import torch

from pagedweight.errors import UserError
from pagedweight.kernels.contract import MoEKernel
from pagedweight.serving.state import LayerState


@cache
def get_kernel(device_type: str) -> MoEKernel:
    """The MoE kernel for tensors of `device_type`; UserError where there is none."""
    if device_type == "cpu":
        from pagedweight.kernels.cpu.kernel import CpuKernel

        return CpuKernel()
    if device_type == "cuda":
        from pagedweight.kernels.cuda.kernel import CudaKernel

        return CudaKernel()
    raise UserError(f"there is no pagedweight kernel for device {device_type!r}")


def warm_up(state: LayerState, dtype: torch.dtype, top_k: int, most_tokens: int) -> None:
    """Have everything in place on a GPU before vLLM measures memory and captures graphs.

    Compiles and loads the code, then calls the kernel at every power of two up to `most_tokens` so
    that its scratch memory has its final size and address: a captured graph allocates nothing.
    Does so once for layers alike. A layer whose table is not filled yet is compiled for, not run.
    Raises UserError for a type or a device that the kernel does not take.
    """
    device = state.table.bits.device
    if device.type != "cuda":
        return
    state.kernel.prepare(device, dtype, state.table_dtype, state.shape.experts)  # type: ignore[attr-defined]
    alike = (device, state.shape, state.activation, state.table_dtype, dtype, top_k, most_tokens)
    if alike in _warm or not bool(state.table.bits.all()):
        return
    _warm.add(alike)
    sizes = {1 << n for n in range(most_tokens.bit_length())} | {most_tokens}
    for tokens in sorted(sizes, reverse=True):
        _call(state, dtype, top_k, tokens, device)
    torch.cuda.synchronize(device)  # a fault is one of loading, not of some later call


_warm: set[tuple[object, ...]] = set()


def _call(
    state: LayerState, dtype: torch.dtype, top_k: int, tokens: int, device: torch.device
) -> None:
    """One call with zeros, every expert in turn."""
    x = torch.zeros((tokens, state.shape.hidden), dtype=dtype, device=device)
    ids = torch.arange(tokens * top_k, dtype=torch.int32, device=device) % state.shape.experts
    weights = torch.zeros((tokens, top_k), dtype=torch.float32, device=device)
    layer = (state.shape, state.table, state.table_dtype, state.activation)
    state.kernel(x, weights, ids.view(tokens, top_k), *layer, torch.empty_like(x))
