"""The kernels' self-test: a small random layer of mixed bits against the float64 reference."""

from __future__ import annotations

import math

import torch

from pagedweight.core.geometry import LayerShape
from pagedweight.errors import UserError
from pagedweight.kernels.contract import MoEKernel
from pagedweight.kernels.reference.kernel import ReferenceKernel
from pagedweight.kernels.synthetic import random_bits, random_layer, random_routing
from pagedweight.serving.doctor.finding import Finding
from pagedweight.serving.kernel import get_kernel

SHAPE = LayerShape(experts=4, hidden=160, intermediate=104)
TOKENS, TOP_K = 5, 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
"""Of the largest output: float32 sums of some hundred terms; two roundings to 8 bits."""


def kernels() -> list[Finding]:
    """The CPU kernel, and the CUDA kernel where there is a GPU."""
    found = [self_test("cpu", torch.float32)]
    if torch.cuda.is_available():
        found.append(self_test("cuda", torch.bfloat16))
    return found


def self_test(device: str, dtype: torch.dtype) -> Finding:
    """One call of the kernel of `device` on every token, compared with the reference."""
    name, way_out = (
        f"{device} kernel",
        "report this with the lines above: results cannot be trusted",
    )
    try:
        error = _error(get_kernel(device), device, dtype)
    except (UserError, RuntimeError, OSError) as failure:
        return Finding(name, "wrong", f"{type(failure).__name__}: {failure}", way_out)
    values = {"relative_error": error, "dtype": str(dtype).removeprefix("torch.")}
    said = f"{error:.1e} of the largest output off the reference, {values['dtype']}"
    right = error <= TOLERANCE[dtype]
    return Finding(name, "ok" if right else "wrong", said, "" if right else way_out, values)


def _error(kernel: MoEKernel, device: str, dtype: torch.dtype) -> float:
    """The largest difference from the reference, as a share of the largest output."""
    generator = torch.Generator().manual_seed(0)
    layer = random_layer(SHAPE, random_bits(SHAPE.experts, generator), device=device)
    x = torch.randn((TOKENS, SHAPE.hidden), generator=generator).to(device, dtype)
    routing = random_routing(TOKENS, SHAPE.experts, TOP_K, generator=generator)
    weights, ids = (tensor.to(device) for tensor in routing)
    got = torch.full_like(x, float("nan"))
    truth = torch.empty_like(x, dtype=torch.float64)
    for run, out in ((kernel, got), (ReferenceKernel(torch.float64), truth)):
        run(x, weights, ids, layer.shape, layer.table, layer.table_dtype, "silu", out)
    error = float((got.double() - truth).abs().max() / truth.abs().max())
    return error if math.isfinite(error) else math.inf
