"""Precision that follows KV pressure inside vLLM: budget, scheduler, worker, block parking."""
