"""A vLLM engine that says a prompt's log-probabilities under one plan after the other: run as a
program, with a checkpoint, an .npz to write, a JSON list of tokens and the plans.

Every engine start costs CI 20 s. So the engine is started with the first plan, as `serve` has it,
and its layers are loaded anew for each of the others, by the store that would have been opened.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy as np
import torch
from vllm import LLM, SamplingParams

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.serving import moe_op
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.parts import Part
from pagedweight.serving.store import _open


def main(path: str, out: str, tokens: list[int], plans: list[str]) -> None:
    """Write log-probabilities [tokens - 1] by plan."""
    checkpoint = Checkpoint.open(path)
    options = [ServeOptions(plan=plan) for plan in plans]
    engine = LLM(
        path,
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=32 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        additional_config=options[0].additional_config(),
    )
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    whole = Part(tuple(range(checkpoint.shape.experts)), 0, 1)
    found = {}
    for plan, option in zip(plans, options, strict=True):
        if option is not options[0]:
            for number, layer in enumerate(checkpoint.moe_layers):
                store = _open(path, option)
                state = store.load(layer, whole, checkpoint.activation, torch.device("cpu"))
                moe_op._LAYERS[number] = state
        answer = engine.generate([{"prompt_token_ids": tokens}], asked, use_tqdm=False)[0]
        said = answer.prompt_logprobs[1:]
        found[plan] = np.array([e[t].logprob for e, t in zip(said, tokens[1:], strict=True)])
    np.savez(out, **found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:])
