"""vLLM on a GPU, CUDA graphs on: what it says through planes is what transformers says without.

pytest tests/serving/test_gpu.py      on a machine with a GPU and vLLM 0.26
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedweight.checkpoint.plan import load_plan, uniform_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.eval.reference import load_quantized
from pagedweight.serving.options import ServeOptions

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]
TOKENS = 24
PROMPTS = [f"{s}{e}" for s in ("The river", "A small town", "def parse(") for e in ("", " was")]
MEAN_TOLERANCE, MOST_TOLERANCE = 0.06, 0.6
"""Of log-probabilities, as for the CPU: both engines round at every layer in their own order."""


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    # Having asked, and quantized on the GPU, this process must not be forked from.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def _generate(path, options: ServeOptions, dtype: str):
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(path),
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=16,
        gpu_memory_utilization=0.1,  # only checked at start; others may use the rest
        kv_cache_memory_bytes=64 << 20,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]},
        additional_config=options.additional_config(),
    )
    try:
        asked = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        return engine.generate(PROMPTS, asked, use_tqdm=False)
    finally:
        engine.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("bits, dtype", [(4, "bfloat16"), (None, "bfloat16"), (None, "float16")])
def test_log_probabilities_of_decoded_tokens(tiny_quantized, random_plan, bits, dtype):
    options = ServeOptions(bits=bits) if bits else ServeOptions(plan=str(random_plan))
    found = _generate(tiny_quantized, options, dtype)
    checkpoint = Checkpoint.open(tiny_quantized)
    plan = uniform_plan(checkpoint, bits) if bits else load_plan(random_plan, checkpoint)
    model = load_quantized(checkpoint, plan, getattr(torch, dtype), torch.device("cpu"))
    off = []
    for output in found:
        new = list(output.outputs[0].token_ids)
        assert len(new) == TOKENS
        tokens = [*output.prompt_token_ids, *new]
        wanted = model.logits(torch.tensor(tokens)).float().log_softmax(-1)
        start = len(tokens) - TOKENS
        for at, entry in enumerate(output.outputs[0].logprobs, start):
            off.append(abs(entry[tokens[at]].logprob - float(wanted[at - 1, tokens[at]])))
    print(f"mean {np.mean(off):.4f}, most {np.max(off):.4f} over {len(off)} tokens")
    assert np.mean(off) < MEAN_TOLERANCE
    assert np.max(off) < MOST_TOLERANCE
