"""Engines of `bench decode` as they run: real vLLM on the CPU, each in its own process."""

from __future__ import annotations

import numpy as np
import pytest
from test_synthetic_checkpoint import small

from pagedweight.bench.decode import PLAN, run_together
from pagedweight.bench.decode_engine import Job
from pagedweight.bench.synthetic import make_checkpoint
from pagedweight.checkpoint.plan import save_plan
from pagedweight.serving.options import ServeOptions

pytestmark = pytest.mark.vllm


@pytest.mark.long
def test_an_engine_beside_one_that_cannot_start(tmp_path):
    config = small("qwen1.5-moe") | {"max_position_embeddings": 512}
    made = make_checkpoint(config, tmp_path / "model", (3, 4), "cpu")
    given = {
        "model": str(made.path),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "kv_cache_memory_bytes": 16 << 20,
        "enforce_eager": True,
        "additional_config": ServeOptions(plan=PLAN).additional_config(),
    }
    jobs = {}
    for name in ("3", "broken"):
        (tmp_path / name).mkdir()
        jobs[name] = Job(tmp_path / name, given, config["vocab_size"], [1, 2], 24, 24, 1)
        if name != "broken":  # that one finds no plan
            shape = (len(made.moe_layers), made.shape.experts, 2)
            save_plan(tmp_path / name / PLAN, np.full(shape, int(name)))
    came = run_together(jobs, 240.0)
    for batch in (1, 2):
        name, row = next(came)
        assert (name, row["batch"]) == ("3", batch)
        assert row["tokens_s"] > 0
        assert row["timed_steps"] >= 10
        assert row["start_s"] > 0
    ((name, row),) = came
    assert name == "broken"
    assert list(row) == ["failed"]
