"""What a layer's method tells the kernel of the shared expert beside it."""

from types import SimpleNamespace

import pytest
import torch

from pagedweight.core.geometry import LayerShape
from pagedweight.kernels.contract import BlockTable
from pagedweight.serving.moe_op import register_layer
from pagedweight.serving.state import LayerState

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    "shared, disabled, beside", [(None, "0", False), (object(), "0", True), (object(), "1", False)]
)
def test_a_shared_expert_on_its_own_stream_is_beside(monkeypatch, shared, disabled, beside):
    from pagedweight.serving.moe_method import PagedWeightMoEMethod

    told = []

    def kernel(x, weights, ids, shape, table, table_dtype, activation, out, **hints):
        told.append(hints["beside"])
        out.zero_()

    state = LayerState(kernel, LayerShape(2, 8, 8), BlockTable.empty(2), torch.bfloat16, "silu")
    method = object.__new__(PagedWeightMoEMethod)
    method.handle = register_layer(state)
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", disabled)
    x, weights = torch.ones(3, 8), torch.ones(3, 1)
    ids = torch.zeros(3, 1, dtype=torch.int32)
    method.apply(SimpleNamespace(expert_map=None), x, weights, ids, shared)
    assert told == [beside]
