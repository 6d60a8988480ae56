"""One engine of `bench tp2`, in a process of its own: timed, asked, or put under pressure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from pagedweight.bench import decode_engine
from pagedweight.bench.decode_engine import Job, measure

TEXTS, TEXT_TOKENS, ANSWER, BURST_NEW = 8, 192, 32, 256
PROMPTS = (
    "The river was first",
    "A small town",
    "In 1912 the company",
    "def parse(",
    "The theorem",
    "After the war he",
    "The first part of the",
    "Most of them were",
)
BURSTS = 4
"""Bursts are as many requests as four times the largest batch."""


def serve(job: Job, connection: Connection) -> None:
    """`decode_engine.serve` with what this benchmark asks of an engine."""
    decode_engine.serve(job, connection, _find)


def _find(engine: Any, job: Job) -> Iterator[dict[str, Any]]:
    yield _found(engine, job)


def _found(engine: Any, job: Job) -> dict[str, Any]:
    if "scheduler_cls" in job.arguments:
        return pressure(engine, job)
    if job.directory.name.startswith("text"):
        return {"said": say(engine, list(PROMPTS))}
    random = np.random.default_rng(0)
    length = min(TEXT_TOKENS, job.prompt_tokens)
    texts = random.integers(0, job.vocabulary, (TEXTS, length)).tolist()
    prompts = [{"prompt_token_ids": text} for text in texts]
    found = {"said": say(engine, prompts), "rows": list(measure(engine, job))}
    if job.directory.name == "tp1":
        found["again"] = [said for prompt in prompts for said in say(engine, [prompt])]
    return found


def say(engine: Any, prompts: list[Any]) -> list[dict[str, Any]]:
    """Of each prompt: log-probabilities of its tokens but the first, the most likely ones instead,
    and the greedy answer."""
    from vllm import SamplingParams

    asked = SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, prompt_logprobs=1, detokenize=False
    )
    found = []
    for output in engine.generate(prompts, asked, use_tqdm=False):
        tokens, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
        found.append(
            {
                "logprobs": [e[t].logprob for e, t in zip(entries, tokens, strict=True)],
                "best": [max(e, key=lambda t: e[t].logprob) for e in entries],
                "answer": list(output.outputs[0].token_ids),
            }
        )
    return found


def pressure(engine: Any, job: Job) -> dict[str, Any]:
    """A burst of requests: what both ranks hold before, at the lowest, and after it."""
    from vllm import SamplingParams

    random, llm = np.random.default_rng(1), engine.llm_engine
    new = min(BURST_NEW, job.prompt_tokens)
    asked = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
    count = BURSTS * max(job.batches)
    prompts = random.integers(0, job.vocabulary, (count, new // 2)).tolist()
    before, low, digests = _state(engine), [], []
    begun = time.perf_counter()
    for name, prompt in enumerate(prompts):
        llm.add_request(f"burst-{name}", {"prompt_token_ids": prompt}, asked)
    lengths: dict[str, int] = {}
    steps = 0
    while llm.has_unfinished_requests():
        for output in llm.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)
        steps += 1
        if steps % 64 == 0:
            low.append(_state(engine))
            digests.append(engine.collective_rpc("bits_digest"))
    took = time.perf_counter() - begun
    deadline = time.perf_counter() + 20
    while min(_state(engine)) < min(before) and time.perf_counter() < deadline:
        time.sleep(0.2)
    return {
        "requests": count,
        "answered": sum(length == new for length in lengths.values()),
        "steps": steps,
        "seconds": round(took, 2),
        "tokens_s": round(new * count / took),
        "bits_at_start": before,
        "bits_lowest": min(low, default=before),
        "bits_after": _state(engine),
        "looks": len(digests),
        "looks_at_which_ranks_had_equal_bits": sum(len(set(d)) == 1 for d in digests),
    }


def _state(engine: Any) -> list[float]:
    """Mean bits of each rank."""
    return [float(np.mean(bits)) for _, bits in engine.collective_rpc("committed_rows")]
