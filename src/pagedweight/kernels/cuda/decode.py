"""Launching csrc/decode.cu and csrc/decode_groups.cu: raw addresses in, one kernel queued. No torch
here."""

from __future__ import annotations

from functools import lru_cache

from pagedweight.core.geometry import LayerShape
from pagedweight.kernels.cuda.compiler import machine_code
from pagedweight.kernels.cuda.driver import Function, Module
from pagedweight.kernels.cuda.params import Params, launch
from pagedweight.kernels.cuda.shapes import (
    Build,
    Device,
    GroupBuild,
    choose_build,
    choose_group_build,
    choose_token_groups,
    group_table,
    is_few,
    pairs_at,
    spared_processors,
    window_of,
)


def _types(bf16: bool, table_bf16: bool) -> dict[str, int]:
    return {"PW_BF16": int(bf16), "PW_TABLE_BF16": int(table_bf16)}


@lru_cache
def load_decode(device: Device, bf16: bool, table_bf16: bool) -> tuple[Function, int]:
    """The kernel for up to 8 tokens an expert, and how many thread blocks are launched: as many as
    fit on the device."""
    build = choose_build(device)
    defines = build.defines() | _types(bf16, table_bf16)
    module = Module(machine_code("decode.cu", defines, device.capability))
    function = module.function("decode", build.shared_bytes(window_of(device)))
    return function, function.blocks_per_processor(build.threads) * device.processors


@lru_cache
def load_decode_groups(
    device: Device, bf16: bool, table_bf16: bool, token_groups: int
) -> tuple[Function, int]:
    """The same for blocks of 8 times `token_groups` tokens."""
    build = choose_group_build(device, token_groups)
    defines = build.defines() | _types(bf16, table_bf16)
    module = Module(machine_code("decode_groups.cu", defines, device.capability))
    function = module.function("decode", build.shared_bytes)
    return function, function.blocks_per_processor(build.threads) * device.processors


def launch_decode(
    device: Device,
    shape: LayerShape,
    bf16: bool,
    table_bf16: bool,
    params: Params,
    stream: int,
    beside: bool = False,
) -> None:
    """Queue one call of at most `shapes.most_pairs` routed pairs, in the device's context.

    beside: see `MoEKernel`.
    """
    tokens, top_k = params.tokens, params.top_k
    build: Build | GroupBuild
    if is_few(shape, tokens, top_k):
        build = choose_build(device)
        function, blocks = load_decode(device, bf16, table_bf16)
    else:
        token_groups = choose_token_groups(shape, tokens, top_k)
        build = choose_group_build(device, token_groups)
        function, blocks = load_decode_groups(device, bf16, table_bf16, token_groups)
    for mixed in (False, True):
        params.set_groups(mixed, group_table(shape, build, device.processors, mixed))
    params.pairs_at = pairs_at(tokens * top_k, shape.experts)
    if beside:
        blocks -= spared_processors(device, tokens) * (blocks // device.processors)
    launch(function, blocks, build.threads, stream, params)
