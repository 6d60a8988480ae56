"""Layers are grouped here, from their sizes alone, as vLLM groups them."""

from __future__ import annotations

import pytest
from vllm_specs import specs_of, vllm_config

from pagedweight.checkpoint.architecture import KVLayer
from pagedweight.serving.elastic.kv_layout import kv_block
from pagedweight.serving.kv_groups import kv_groups


@pytest.mark.parametrize("full", [1, 2, 4, 5, 25])
@pytest.mark.parametrize("sliding", [0, 1, 2, 5, 13])
@pytest.mark.parametrize("heads", [1, 2, 3, 8])
def test_the_forecast_groups_layers_as_vllm_does(full, sliding, heads):
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    groups = get_kv_cache_groups(vllm_config(), specs_of(full, sliding, heads))
    layers = [KVLayer(1, 128, None)] * full + [KVLayer(heads, 64, 16)] * sliding
    found = kv_groups(layers, 32, 4)
    assert found is not None
    assert found.block == kv_block(groups)
    assert sorted(found.block_tokens) == sorted(g.kv_cache_spec.block_size for g in groups)


def test_a_forecast_of_layers_that_vllm_refuses_to_unify_is_none():
    assert kv_groups([KVLayer(1, 64, None), KVLayer(2, 64, None)], 16, 2) is None
    assert kv_groups([KVLayer(1, 64, 9), KVLayer(2, 64, 9)], 16, 2) is None
    assert kv_groups([KVLayer(1, 64, 9), KVLayer(2, 64, None)], 16, 2) is not None
