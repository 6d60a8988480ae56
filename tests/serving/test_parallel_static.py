"""Two ranks at fixed bits: experts dealt out (expert parallel) or layers dealt out (pipeline)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedweight.checkpoint.plan import load_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.eval.reference import load_quantized
from pagedweight.serving.options import ServeOptions

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1100)]
TOKENS = 16
PROMPTS = [
    "The river",
    "A small town was first",
    "In 1912 the company",
    "def parse(",
    "The theorem",
]


def held(worker: Any) -> list[tuple[int, int]]:
    """(experts, their width) of every MoE layer in the process of `worker`."""
    from pagedweight.serving import moe_op

    return [(state.shape.experts, state.shape.intermediate) for state in moe_op._LAYERS]


@pytest.mark.parametrize(
    ("asked", "parts"),
    [
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enforce_eager": True},
            [(8, 256)] * 4,
        ),
        ({"pipeline_parallel_size": 2}, [(16, 256)] * 2),  # not eager: see serving/conflicts.py
    ],
    ids=["expert parallel", "pipeline parallel"],
)
def test_two_ranks_say_what_the_reference_says(
    tiny_quantized, random_plan, monkeypatch, asked, parts
):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv(
        "VLLM_ALLOW_INSECURE_SERIALIZATION", "1"
    )  # to ask the workers what they hold
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(tiny_quantized),
        dtype="float32",
        max_model_len=128,
        kv_cache_memory_bytes=32 << 20,
        additional_config=ServeOptions(plan=str(random_plan)).additional_config(),
        **asked,
    )
    try:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        found = engine.generate(PROMPTS, sampling, use_tqdm=False)
        assert engine.collective_rpc(held) == [parts, parts]
    finally:
        engine.llm_engine.engine_core.shutdown()
    checkpoint = Checkpoint.open(tiny_quantized)
    plan = load_plan(random_plan, checkpoint)
    model = load_quantized(checkpoint, plan, torch.float32, torch.device("cpu")).model
    for output in found:
        prompt = torch.tensor([output.prompt_token_ids])
        wanted = model.generate(
            prompt, do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS
        )
        assert list(output.outputs[0].token_ids) == wanted[0, prompt.shape[1] :].tolist()
