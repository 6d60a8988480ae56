"""What vLLM says through planes is what transformers says with the dequantized weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from pagedweight.checkpoint.plan import load_plan, uniform_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.eval.reference import load_quantized
from pagedweight.serving.options import ServeOptions

pytestmark = pytest.mark.vllm
TOKENS = 24
SUBJECTS = ("The river", "A small town", "In 1912 the company", "def parse(", "The theorem")
ENDINGS = ("", " was first", " and the", " in the north of")
PROMPTS = [subject + ending for subject in SUBJECTS for ending in ENDINGS]
MEAN_TOLERANCE, MOST_TOLERANCE = 0.06, 0.6
"""Of log-probabilities in bfloat16, over all prompt tokens: both engines round at every layer, in
their own order of additions, and a logit of 16 has steps of 0.06; measured 0.035 and 0.36."""


def _options(bits: int | None, plan) -> ServeOptions:
    return ServeOptions(bits=bits) if bits else ServeOptions(plan=str(plan))


def _generate(path, options: ServeOptions, dtype: str, eager: bool, **sampling):
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(path),
        dtype=dtype,
        max_model_len=128,
        kv_cache_memory_bytes=32 << 20,
        enforce_eager=eager,
        additional_config=options.additional_config(),
    )
    try:
        return engine.generate(PROMPTS, SamplingParams(temperature=0, **sampling), use_tqdm=False)
    finally:
        engine.llm_engine.engine_core.shutdown()


def _reference(path, options: ServeOptions, dtype: torch.dtype):
    checkpoint = Checkpoint.open(path)
    plan = (
        uniform_plan(checkpoint, options.bits)
        if options.bits
        else load_plan(options.plan, checkpoint)
    )
    return load_quantized(checkpoint, plan, dtype, torch.device("cpu"))


@pytest.mark.parametrize("bits, eager", [(3, True), (None, True), (None, False)])
def test_greedy_tokens_in_float32(tiny_quantized, random_plan, bits, eager):
    options = _options(bits, random_plan)
    found = _generate(tiny_quantized, options, "float32", eager, max_tokens=TOKENS, ignore_eos=True)
    model = _reference(tiny_quantized, options, torch.float32).model
    for output in found:
        prompt = torch.tensor([output.prompt_token_ids])
        wanted = model.generate(
            prompt, do_sample=False, min_new_tokens=TOKENS, max_new_tokens=TOKENS
        )
        assert list(output.outputs[0].token_ids) == wanted[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("bits, eager", [(6, True), (None, False)])
def test_log_probabilities_in_bfloat16(tiny_quantized, random_plan, bits, eager):
    options = _options(bits, random_plan)
    found = _generate(tiny_quantized, options, "bfloat16", eager, max_tokens=1, prompt_logprobs=0)
    model = _reference(tiny_quantized, options, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(tiny_quantized)
    off = []
    for output, text in zip(found, PROMPTS, strict=True):
        tokens = output.prompt_token_ids
        assert tokens == tokenizer(text)["input_ids"]
        wanted = model.logits(torch.tensor(tokens)).float().log_softmax(-1)
        for at, entry in enumerate(output.prompt_logprobs[1:], 1):
            off.append(abs(entry[tokens[at]].logprob - float(wanted[at - 1, tokens[at]])))
    assert np.mean(off) < MEAN_TOLERANCE
    assert np.max(off) < MOST_TOLERANCE
    print(f"mean {np.mean(off):.4f}, most {np.max(off):.4f} over {len(off)} tokens")
