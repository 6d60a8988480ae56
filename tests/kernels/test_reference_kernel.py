"""The reference reads addresses, not tensors, and is dequantize-then-multiply."""

import pytest
import torch
from torch.nn import functional

from pagedweight.core.geometry import DOWN, GATE_UP, LayerShape
from pagedweight.kernels.contract import LayerStats
from pagedweight.kernels.reference.kernel import ReferenceKernel, read_block
from pagedweight.kernels.synthetic import random_bits, random_layer, random_routing

SHAPE = LayerShape(experts=5, hidden=70, intermediate=37)


@pytest.fixture(scope="module")
def layer():
    return random_layer(SHAPE, random_bits(5, torch.Generator().manual_seed(3)), torch.float16)


def test_blocks_read_through_addresses_are_the_layer(layer):
    for kind in (GATE_UP, DOWN):
        dense = layer.dense(kind)
        for expert in range(SHAPE.experts):
            read = read_block(layer.table, SHAPE, expert, kind, layer.table_dtype, torch.float32)
            assert torch.equal(read, dense[expert])


def test_output_is_the_token_by_token_definition(layer):
    gen = torch.Generator().manual_seed(4)
    x = torch.randn(7, SHAPE.hidden, generator=gen, dtype=torch.float64).float()
    weights, ids = random_routing(7, SHAPE.experts, 2, generator=gen)
    ids[3, 1] = -1
    ids[5] = -1
    out = torch.empty(7, SHAPE.hidden, dtype=torch.float64)
    stats = LayerStats.empty(SHAPE.experts)
    ReferenceKernel(torch.float64)(
        x,
        weights,
        ids,
        SHAPE,
        layer.table,
        layer.table_dtype,
        "silu",
        out,
        stats,
        torch.tensor([6]),
    )
    gate_up, down = layer.dense(GATE_UP).double(), layer.dense(DOWN).double()
    want = torch.zeros_like(out)
    mass = torch.zeros(SHAPE.experts)
    largest = torch.zeros(SHAPE.experts, 2)
    for t in range(7):
        for r, e in zip(weights[t], ids[t].tolist(), strict=True):
            if e < 0:
                continue
            both = gate_up[e] @ x[t].double()
            hidden = functional.silu(both[: SHAPE.intermediate]) * both[SHAPE.intermediate :]
            want[t] += r.double() * (down[e] @ hidden.float().double())
            if t < 6:
                mass[e] += r
                for kind, v in enumerate((x[t], hidden.float())):
                    largest[e, kind] = max(largest[e, kind], v.norm())
    assert torch.allclose(out, want, rtol=1e-12, atol=1e-12)
    assert (out[5] == 0).all()
    assert torch.allclose(stats.mass, mass)
    assert int(stats.tokens.sum()) == int((ids[:6] >= 0).sum())
    assert torch.allclose(stats.features[..., 2], largest)
