"""Launching csrc/prefill.cu: the plan, then the work. No torch here."""

from __future__ import annotations

from functools import lru_cache

from pagedweight.core.geometry import LayerShape
from pagedweight.kernels.cuda.compiler import machine_code
from pagedweight.kernels.cuda.driver import Function, Module
from pagedweight.kernels.cuda.params import Params, launch
from pagedweight.kernels.cuda.shapes import (
    PARTS_BYTES,
    PLANNERS,
    WIDE_WARPS,
    Device,
    most_wide_blocks,
    prefill_shared_bytes,
)


@lru_cache
def load_prefill(
    device: Device, bf16: bool, table_bf16: bool, experts: int
) -> tuple[Function, Function]:
    """The kernels that plan and that work, for a layer of `experts`."""
    types = {"PW_BF16": int(bf16), "PW_TABLE_BF16": int(table_bf16)}
    module = Module(machine_code("prefill.cu", types, device.capability))
    plan = module.function("plan", (PLANNERS + 2) * experts * 4)
    return plan, module.function("prefill", prefill_shared_bytes())


def plan_bytes(pairs: int, experts: int) -> int:
    """Bytes of `WidePlan` (csrc/prefill.cu)."""
    return 4 * (4 + 5 * most_wide_blocks(pairs, experts) + pairs)


def most_tokens(shape: LayerShape, top_k: int) -> int:
    """Tokens of one launch at most, so that scratch memory stays within bounds."""
    return max(1, PARTS_BYTES // (shape.hidden * 4 * top_k))


def launch_prefill(
    device: Device, shape: LayerShape, bf16: bool, table_bf16: bool, params: Params, stream: int
) -> None:
    """Queue one call of at most `most_tokens` tokens, in the device's context."""
    params.pairs_at = 4 + 5 * most_wide_blocks(params.tokens * params.top_k, shape.experts)
    plan, prefill = load_prefill(device, bf16, table_bf16, shape.experts)
    launch(plan, 1, PLANNERS * 32, stream, params)
    launch(prefill, device.processors, WIDE_WARPS * 32, stream, params)
