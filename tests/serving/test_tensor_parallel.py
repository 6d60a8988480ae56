"""Two ranks of real vLLM: a burst moves the same rows on both, and no request is lost."""

from __future__ import annotations

import pytest

from pagedweight.core.policy import Policy
from pagedweight.core.policy_file import save_policy
from pagedweight.runtime.timeline import Timeline
from pagedweight.serving.launch import SCHEDULER, WORKER
from pagedweight.serving.options import ServeOptions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1100)]
MEMORY = 12 << 20
"""For each rank: half of each expert."""


def test_two_ranks_follow_one_plan(tiny_quantized, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    from vllm import LLM, SamplingParams

    save_policy(Policy(offload_blocks=6, reload_blocks=16, dwell_steps=8), tmp_path / "policy.json")
    options = ServeOptions(
        memory=MEMORY,
        policy=str(tmp_path / "policy.json"),
        timeline=str(tmp_path / "run.jsonl"),
    )
    engine = LLM(
        str(tiny_quantized),
        tensor_parallel_size=2,
        scheduler_cls=SCHEDULER,
        worker_cls=WORKER,
        additional_config=options.additional_config(),
        kv_cache_memory_bytes=MEMORY,
        max_model_len=512,
        block_size=32,
        enforce_eager=True,
        dtype="float32",
    )
    try:
        asked = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True)
        digests = []
        for count in (1, 24, 1):
            outputs = engine.generate([f"{n} The history of" for n in range(count)], asked)
            assert [len(out.outputs[0].token_ids) for out in outputs] == [96] * count
            digests.append(engine.collective_rpc("bits_digest"))
        assert all(first == second for first, second in digests)
    finally:
        engine.llm_engine.engine_core.shutdown()
    run = Timeline.load(tmp_path / "run.jsonl")
    bits, usable = run.column("bits"), run.column("kv_usable")
    assert bits.min() < bits[0] - 1
    assert usable.max() > usable[0]
    assert run.column("preemptions")[-1] == 0
