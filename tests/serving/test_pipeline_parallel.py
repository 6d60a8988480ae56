"""Two stages of real vLLM, started as it starts them: each gives bits of its own layers, by one
plan, and before and after it they say what the reference says.

Expert and tensor parallelism by family: `tests/architectures/test_served_architectures.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.policy import Policy
from pagedweight.core.policy_file import save_policy
from pagedweight.eval.reference import load_quantized
from pagedweight.runtime.timeline import Timeline
from pagedweight.serving.launch import SCHEDULER, WORKER
from pagedweight.serving.options import ServeOptions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1100)]
MEMORY = 12 << 20
"""For each rank: half of the layers at all their bits, and a little KV."""
TOKENS = 16
PROMPTS = ["The river", "A small town was first", "def parse(", "The theorem"]


def rows_lowered(worker: Any) -> int:
    """Rows that the rank of `worker` has lowered so far."""
    return worker.store.worker.counters.rows_lowered


def test_two_stages_follow_one_plan(tiny_quantized, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to ask the workers
    from vllm import LLM, SamplingParams

    policy, timeline = tmp_path / "policy.json", tmp_path / "run.jsonl"
    save_policy(Policy(offload_blocks=6, reload_blocks=16, dwell_steps=8), policy)
    options = ServeOptions(memory=MEMORY, policy=str(policy), timeline=str(timeline))
    engine = LLM(
        str(tiny_quantized),
        pipeline_parallel_size=2,  # not eager: see serving/conflicts.py
        scheduler_cls=SCHEDULER,
        worker_cls=WORKER,
        additional_config=options.additional_config(),
        kv_cache_memory_bytes=MEMORY,
        max_model_len=256,
        block_size=32,
        dtype="float32",
        enable_prefix_caching=False,
    )
    try:
        few = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        many = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True)
        said = [engine.generate(PROMPTS, few, use_tqdm=False)]
        held = [engine.collective_rpc("committed_rows")]
        burst = engine.generate([f"{n} The history of" for n in range(24)], many, use_tqdm=False)
        assert [len(out.outputs[0].token_ids) for out in burst] == [96] * 24
        lowered = engine.collective_rpc(rows_lowered)
        said.append(engine.generate(PROMPTS, few, use_tqdm=False))
        held.append(engine.collective_rpc("committed_rows"))
    finally:
        engine.llm_engine.engine_core.shutdown()
    checkpoint = Checkpoint.open(tiny_quantized)
    rows = len(checkpoint.moe_layers) * checkpoint.shape.experts * 2
    plans = [np.zeros(rows, np.int8) for _ in held]
    for plan, ranks in zip(plans, held, strict=True):
        assert [numbers for numbers, _ in ranks] == [[*range(rows // 2)], [*range(rows // 2, rows)]]
        for numbers, bits in ranks:
            plan[numbers] = bits
    assert min(lowered) > 0, "each stage gave some"
    for plan, words in zip(plans, said, strict=True):
        assert (plan == 6).all()
        check_tokens(checkpoint, plan, words)
    run = Timeline.load(timeline)
    assert run.column("kv_usable").max() > run.column("kv_usable")[0]
    assert run.column("bits").min() < run.column("bits")[0] - 1
    assert run.column("preemptions")[-1] == run.column("rollbacks")[-1] == 0


def check_tokens(checkpoint: Checkpoint, plan: np.ndarray, said: list) -> None:
    """Greedy tokens are the reference's at `plan` [rows]."""
    shape = (len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
    model = load_quantized(checkpoint, plan.reshape(shape), torch.float32, torch.device("cpu"))
    for output in said:
        prompt = torch.tensor([output.prompt_token_ids])
        wanted = model.model.generate(
            prompt, do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS
        )
        assert list(output.outputs[0].token_ids) == wanted[0, prompt.shape[1] :].tolist()
