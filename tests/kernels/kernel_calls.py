"""One call of a kernel, drawn at random, and how far from the truth its result may be."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedweight.core.geometry import DOWN, GATE_UP, LayerShape
from pagedweight.kernels.cpu.kernel import CpuKernel
from pagedweight.kernels.reference.kernel import ReferenceKernel, activate
from pagedweight.kernels.synthetic import SyntheticLayer, random_bits, random_layer, random_routing

TOLERANCE = {torch.float32: 4e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Of `Call.magnitude`: a few float32 roundings, or two units in the last place of a 16-bit type
(the hidden row may fall on the other side of a tie, and the output is rounded once more)."""


@dataclass(frozen=True)
class Call:
    """What a kernel is given, but for `out` and the statistics."""

    layer: SyntheticLayer
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    activation: str = "silu"

    def run(self, kernel, stats=None, num_tokens=None, rows=slice(None), out_dtype=None):
        """The output [T, H] for the tokens `rows`; what is not written stays NaN."""
        x, layer = self.x[rows].contiguous(), self.layer
        weights, ids = self.weights[rows].contiguous(), self.ids[rows].contiguous()
        out = torch.full_like(x, float("nan"), dtype=out_dtype or x.dtype)
        args = (layer.shape, layer.table, layer.table_dtype, self.activation)
        kernel(x, weights, ids, *args, out, stats, num_tokens)
        return out

    def magnitude(self):
        """[T, 1] float64: the largest sum of absolute terms in a token's output, at least 1e-6."""
        gate_up, down = (self.layer.dense(kind).double() for kind in (GATE_UP, DOWN))
        total = torch.zeros(self.x.shape, dtype=torch.float64)
        for token, choice in torch.nonzero(self.ids >= 0).tolist():
            expert = int(self.ids[token, choice])
            gate, up = (gate_up[expert] @ self.x[token].double()).chunk(2)
            hidden = (activate(gate, self.activation) * up).abs()
            spread = gate_up[expert].abs() @ self.x[token].double().abs()
            hidden = hidden + 1e-2 * spread.chunk(2)[1]  # cancellation inside gate and up
            total[token] += self.weights[token, choice].double() * (down[expert].abs() @ hidden)
        return total.max(1, keepdim=True).values.clamp_min(1e-6)

    def check(self, kernel, stats=None, num_tokens=None):
        """Assert that the kernel is within tolerance of the float64 reference; its output."""
        out = self.run(kernel, stats, num_tokens)
        truth = self.run(ReferenceKernel(torch.float64), out_dtype=torch.float64)
        error = ((out.double() - truth).abs() / self.magnitude()).max()
        assert error <= TOLERANCE[self.x.dtype], f"off by {error:.2e} of the sum of terms"
        return out


def make_call(
    shape: LayerShape,
    tokens: int,
    top_k: int,
    dtype: torch.dtype = torch.float32,
    table_dtype: torch.dtype = torch.bfloat16,
    activation: str = "silu",
    routing: str = "uniform",
    seed: int = 0,
    planes: int = 6,
) -> Call:
    """A poisoned layer with random bits per expert and kind, random tokens, int32 ids."""
    gen = torch.Generator().manual_seed(seed)
    bits = random_bits(shape.experts, gen, 2, planes)
    layer = random_layer(shape, bits, table_dtype, generator=gen, planes=planes)
    x = torch.randn((tokens, shape.hidden), generator=gen).to(dtype)
    weights, ids = random_routing(tokens, shape.experts, top_k, routing, generator=gen)
    return Call(layer, x, weights, ids, activation)


class PoisonedKernel(CpuKernel):
    """The CPU kernel with NaN in its scratch memory before every call."""

    def __call__(self, *args, **kwargs):
        self._scratch._bytes.fill(0xFF)
        super().__call__(*args, **kwargs)
