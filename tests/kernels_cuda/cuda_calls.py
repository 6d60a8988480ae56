"""One call of the CUDA kernel on random data, and how far from float64 its result may be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedweight.core.geometry import LayerShape
from pagedweight.kernels.contract import LayerStats
from pagedweight.kernels.reference.kernel import ReferenceKernel
from pagedweight.kernels.synthetic import SyntheticLayer, random_bits, random_layer, random_routing

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the Euclidean norm of the whole output."""


@dataclass(frozen=True)
class Call:
    """What a kernel is given, but for `out` and the statistics; all on the GPU."""

    layer: SyntheticLayer
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    activation: str = "silu"

    def run(
        self, kernel, stats=None, num_tokens=None, rows=slice(None), out_dtype=None, beside=False
    ):
        """The output [T, H] for the tokens `rows`; what is not written stays NaN."""
        x, layer = self.x[rows].contiguous(), self.layer
        weights, ids = self.weights[rows].contiguous(), self.ids[rows].contiguous()
        out = torch.full_like(x, float("nan"), dtype=out_dtype or x.dtype)
        args = (layer.shape, layer.table, layer.table_dtype, self.activation)
        kernel(x, weights, ids, *args, out, stats, num_tokens, beside)
        return out

    def truth(self, stats=None, num_tokens=None):
        """The float64 reference."""
        return self.run(ReferenceKernel(torch.float64), stats, num_tokens, out_dtype=torch.float64)

    def check(self, kernel, stats=None, num_tokens=None):
        """Assert that the kernel is within tolerance of the float64 reference; its output."""
        out, truth = self.run(kernel, stats, num_tokens), self.truth()
        error = float((out.double() - truth).norm() / truth.norm().clamp_min(1e-30))
        assert error <= TOLERANCE[self.x.dtype], f"relative error {error:.2e}"
        return out

    def stats(self):
        return LayerStats.empty(self.layer.shape.experts, self.x.device)


def make_call(
    device: torch.device,
    shape: LayerShape,
    tokens: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    table_dtype: torch.dtype = torch.bfloat16,
    activation: str = "silu",
    routing: str = "uniform",
    seed: int = 0,
    low: int = 2,
    planes: int = 6,
    bits: torch.Tensor | None = None,
) -> Call:
    """A poisoned layer with random bits low..planes per expert and kind, or with `bits` [E, 2], and
    random tokens."""
    gen = torch.Generator(device).manual_seed(seed)
    if bits is None:
        bits = random_bits(shape.experts, gen, low, planes)
    layer = random_layer(shape, bits, table_dtype, device, gen, planes)
    x = torch.randn((tokens, shape.hidden), generator=gen, device=device).to(dtype)
    weights, ids = random_routing(tokens, shape.experts, top_k, routing, device, gen)
    return Call(layer, x, weights, ids, activation)
