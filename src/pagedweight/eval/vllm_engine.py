"""The vLLM engine: token log-probabilities from vLLM's own prompt log-probabilities.

The model runs as it is served: the plugin's kernels, vLLM's attention, the model's own type unless
asked otherwise. Tested with vLLM 0.32 on the CPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedweight.checkpoint.names import text_config, value
from pagedweight.checkpoint.shards import read_json
from pagedweight.eval.statistics import Floats
from pagedweight.serving.options import ServeOptions

_BLOCK_TOKENS = 128
"""The largest usual block of KV cache, in tokens."""


def vllm_nll(
    path: Path, options: ServeOptions | None, tokens: torch.Tensor, dtype: str | None
) -> Floats:
    """Mean -log p(next token) of each window [windows], nats, for tokens [windows, W].

    options: level or plan of a quantized checkpoint; None for an unquantized one. dtype: vLLM's,
    None for the model's own. Starts an engine and ends it.
    """
    with quiet_engine():
        from vllm import LLM, SamplingParams

        engine = LLM(
            str(path),
            dtype=dtype or "auto",
            max_model_len=tokens.shape[1] + 1,  # vLLM wants room for one token after the prompt
            max_num_seqs=1,
            kv_cache_memory_bytes=kv_bytes(path, tokens.shape[1] + 1),
            enable_prefix_caching=False,
            enforce_eager=True,
            disable_log_stats=True,
            additional_config=options.additional_config() if options else {},
        )
        try:
            asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
            prompts: Any = [{"prompt_token_ids": row} for row in tokens.tolist()]
            outputs = engine.generate(prompts, asked)
        finally:
            engine.llm_engine.engine_core.shutdown()
    pairs = zip(outputs, tokens, strict=True)
    return np.array([_mean_nll(found.prompt_logprobs, row) for found, row in pairs])


def _mean_nll(logprobs: Any, tokens: torch.Tensor) -> float:
    """The first entry is None: nothing predicts the first token."""
    pairs = zip(logprobs[1:], tokens[1:].tolist(), strict=True)
    return -float(np.mean([entry[token].logprob for entry, token in pairs]))


def kv_bytes(path: Path, tokens: int) -> int:
    """Bytes of KV cache that surely hold one window: every layer as if it kept all tokens.

    float32 keys and values, twice over, because vLLM keeps a null block and rounds to blocks.
    """
    config = text_config(read_json(path / "config.json"))
    heads = value(config, ("num_key_value_heads", "num_attention_heads"))
    size = config.get("head_dim") or value(config, ("hidden_size",)) // value(
        config, ("num_attention_heads",)
    )
    size = max(size, config.get("global_head_dim") or 0)
    blocks = -(-tokens // _BLOCK_TOKENS) + 1
    layer = 2 * heads * size * 4 * _BLOCK_TOKENS * blocks
    return 2 * value(config, ("num_hidden_layers",)) * layer


@contextmanager
def quiet_engine() -> Iterator[None]:
    """What an engine is started and run in, so that standard output stays ours."""
    with _environment(), _stdout_to_stderr():
        yield


@contextmanager
def _environment() -> Iterator[None]:
    """vLLM's variables for one engine: one token past the model's positions, warnings only.

    The position past the end is never computed; only the room for it is asked for.
    """
    wanted = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: text for name, text in wanted.items() if before[name] is None})
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                os.environ.pop(name, None)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """vLLM and its processes write to standard output; that one belongs to our result.

    Both the stream of this process (vLLM's log handler keeps the one it is imported under) and the
    descriptor that its processes inherit.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
