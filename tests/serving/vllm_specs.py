"""KV cache specs of vLLM's for models that are only planned, and a config to plan them with."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def vllm_config(**scheduler):
    """The parts of a VllmConfig that planning KV reads; real ones need a model."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    scheduler = {"disable_hybrid_kv_cache_manager": False, **scheduler}
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBHNC,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
    )
    return SimpleNamespace(
        cache_config=cache,
        scheduler_config=SimpleNamespace(**scheduler),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )


def specs_of(full, sliding, heads):
    """Specs of a float32 model: full layers with one head of 64, sliding ones with heads of 32."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    specs = {}
    for n in range(full):
        specs[f"f{n}"] = FullAttentionSpec(
            block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32
        )
    for n in range(sliding):
        specs[f"s{n}"] = SlidingWindowSpec(
            block_size=32, num_kv_heads=heads, head_size=32, dtype=torch.float32, sliding_window=16
        )
    return specs
