"""Launching csrc/decode.cu: raw addresses in, one kernel queued. No torch here."""

from __future__ import annotations

from functools import lru_cache

from pagedweight.core.geometry import LayerShape
from pagedweight.kernels.cuda.compiler import machine_code
from pagedweight.kernels.cuda.driver import Function, Module
from pagedweight.kernels.cuda.params import Params, launch
from pagedweight.kernels.cuda.shapes import (
    Device,
    choose_build,
    choose_groups,
    pairs_at,
    window_of,
)


@lru_cache
def load_decode(device: Device, bf16: bool, table_bf16: bool) -> tuple[Function, int]:
    """The kernel and how many thread blocks are launched: as many as fit on the device."""
    build = choose_build(device)
    defines = build.defines() | {"PW_BF16": int(bf16), "PW_TABLE_BF16": int(table_bf16)}
    module = Module(machine_code("decode.cu", defines, device.capability))
    function = module.function("decode", build.shared_bytes(window_of(device)))
    return function, function.blocks_per_processor(build.threads) * device.processors


def launch_decode(
    device: Device, shape: LayerShape, bf16: bool, table_bf16: bool, params: Params, stream: int
) -> None:
    """Queue one call of at most `shapes.most_pairs` routed pairs, in the device's context."""
    build = choose_build(device)
    groups = choose_groups(shape, params.tokens, params.top_k, build, device.processors)
    params.log_group_gate_up, params.log_group_down = groups
    params.pairs_at = pairs_at(params.tokens * params.top_k, shape.experts)
    function, blocks = load_decode(device, bf16, table_bf16)
    launch(function, blocks, build.threads, stream, params)
