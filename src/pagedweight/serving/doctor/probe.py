"""Run as a module in a process of its own: does vLLM find the plugin, and does an engine run?

    python -m pagedweight.serving.doctor.probe           vLLM's plugin loading alone
    python -m pagedweight.serving.doctor.probe OUT       and one engine on OUT, four tokens

The last line of standard output is a JSON object; everything else is vLLM's own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

TOKENS = 4
_KV_BYTES = 1 << 28


def plugin() -> dict[str, Any]:
    """Whether vLLM has the method after loading plugins as it does; if not, why."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    found: dict[str, Any] = {
        "registered": "pagedweight" in QUANTIZATION_METHODS,
        "platform": current_platform.device_name,
    }
    if not found["registered"]:  # vLLM only logs what a plugin raises
        from pagedweight.serving.plugin import register

        try:
            register()
        except Exception as error:  # whatever it is, it is the answer
            found["error"] = f"{type(error).__name__}: {error}"
    return found


def engine(path: str) -> dict[str, Any]:
    """Start an engine at the lowest stored bits and count the tokens that it gives.

    It takes as little memory as it can, and asks with token numbers: there may be no tokenizer.
    """
    from vllm import LLM, SamplingParams

    from pagedweight.checkpoint.reader import Checkpoint
    from pagedweight.serving.options import ServeOptions

    model = LLM(
        path,
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=1,
        kv_cache_memory_bytes=_KV_BYTES,
        gpu_memory_utilization=0.05,  # only checked at start: others may use the rest
        enforce_eager=True,
        additional_config=ServeOptions(bits=Checkpoint.open(path).bits[0]).additional_config(),
    )
    try:
        sampling = SamplingParams(
            max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False
        )
        prompt: Any = [{"prompt_token_ids": [1, 2, 3]}]
        outputs = model.generate(prompt, sampling)
        return {"tokens": len(outputs[0].outputs[0].token_ids)}
    finally:
        model.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    answer = plugin()
    if sys.argv[1:]:
        answer |= engine(sys.argv[1])
    print(json.dumps(answer), flush=True)
