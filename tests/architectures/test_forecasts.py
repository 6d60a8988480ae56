"""What `inspect --config` counts of published models: as many parameters as their cards say."""

from __future__ import annotations

import pytest
from published import PUBLISHED

from pagedweight.serving.forecast import Forecast, Question

BILLIONS = {
    "Qwen1.5-MoE-A2.7B": 14.3,
    "Qwen2-57B-A14B": 57.4,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
    "Mixtral-8x7B": 46.7,
    "Mixtral-8x22B": 141,
    "OLMoE-1B-7B": 6.9,
    "DeepSeek-V2-Lite": 15.7,
    "DeepSeek-V2": 236,
    "DeepSeek-V3": 671,
    "Moonlight-16B-A3B": 16,
    "Phi-3.5-MoE": 41.9,
    "granite-3.0-1b-a400m": 1.33,
    "granite-3.0-3b-a800m": 3.3,
}
"""Total parameters by the model cards; Gemma 4 is in tests/cli, with all the keys it needs."""


@pytest.mark.parametrize("name", sorted(BILLIONS))
def test_parameters_and_kv(name):
    published = PUBLISHED[name]
    found = Forecast.of({**published.config, "dtype": "bfloat16"}, Question())
    shape = found.facts.shape
    experts = published.moe_layers * shape.experts * 3 * shape.hidden * shape.intermediate
    total = (experts + found.plain.nbytes / 2) / 1e9
    assert total == pytest.approx(BILLIONS[name], rel=0.02)
    assert found.token_bytes == published.kv_bytes
    assert found.one_size
