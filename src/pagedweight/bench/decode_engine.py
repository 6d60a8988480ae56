"""One vLLM engine, started and timed: what `bench decode` runs in a process of its own.

Relies on: LLM, LLMEngine.add_request and step, SamplingParams, RequestOutputKind. Tested with vLLM
0.26 on a GPU.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

SETTLED = 8
"""Tokens that every request has before decoding is timed."""


@dataclass(frozen=True)
class Job:
    """An engine and what to time on it. `arguments`: of vLLM's LLM; `vocabulary`: of the model."""

    directory: Path
    arguments: Mapping[str, Any]
    vocabulary: int
    batches: Sequence[int]
    prompt_tokens: int
    new_tokens: int
    repeats: int


Find = Callable[[Any, Job], Iterator[Any]]
"""What is done with a started engine; each thing found is sent to the process that asked at once:
an engine that is ended in the middle has told what it had."""


@dataclass(frozen=True)
class Step:
    """After a step of the engine: seconds, and the fewest, most and all tokens of the requests."""

    seconds: float
    fewest: int
    most: int
    total: int


def serve(job: Job, connection: Connection, find: Find | None = None) -> None:
    """Start the engine, say ("started", seconds), wait for a word, and send what `find` finds with
    it (None: the rows of `measure`), one thing at a time, and None after the last.

    Whatever goes wrong is sent as text. In a process group of its own, so that the engine's own
    processes can be ended with it; in `job.directory`, where relative paths of its options start.
    """
    os.setsid()
    os.chdir(job.directory)
    try:
        engine, started = start(job)
        try:
            connection.send(("started", started))
            connection.recv()
            for found in (find or measure)(engine, job):
                connection.send(found)
            connection.send(None)
        finally:
            engine.llm_engine.engine_core.shutdown()
    except BaseException:
        connection.send(traceback.format_exc())
        raise


def start(job: Job) -> tuple[Any, float]:
    """An engine that has served a request, and the seconds it took to start."""
    from vllm import LLM

    begun = time.perf_counter()
    engine = LLM(**job.arguments)
    seconds = time.perf_counter() - begun
    generate(engine, job, 1, 0)  # what compiles at first use
    return engine, seconds


def measure(engine: Any, job: Job) -> Iterator[dict[str, Any]]:
    """Rows by batch: tokens a second while all requests decode, and of the prefill before it."""
    for batch in job.batches:
        runs = [generate(engine, job, batch, n + 1) for n in range(job.repeats)]
        found = [rates(steps, batch, job) for steps in runs]
        best = max(found, key=lambda row: row["tokens_s"])
        yield {"batch": batch, **best, "runs_tokens_s": [row["tokens_s"] for row in found]}


def generate(engine: Any, job: Job, batch: int, seed: int) -> list[Step]:
    """Serve `batch` requests of random tokens to their end; every step that gave tokens.

    Tokens are sampled at temperature 1: sequences of a random model that all repeat one token would
    all be routed alike.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    asked = SamplingParams(
        temperature=1.0,
        max_tokens=job.new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    random = np.random.default_rng(seed)
    prompts = random.integers(0, job.vocabulary, (batch, job.prompt_tokens)).tolist()
    counts = {f"{seed}-{batch}-{n}": 0 for n in range(batch)}
    llm, steps = engine.llm_engine, [Step(time.perf_counter(), 0, 0, 0)]
    for name, prompt in zip(counts, prompts, strict=True):
        llm.add_request(name, TokensPrompt(prompt_token_ids=prompt), asked)
    while llm.has_unfinished_requests():
        for output in llm.step():
            counts[output.request_id] += sum(len(o.token_ids) for o in output.outputs)
        found = counts.values()
        steps.append(Step(time.perf_counter(), min(found), max(found), sum(found)))
    if set(counts.values()) != {job.new_tokens}:
        raise RuntimeError(f"asked for {job.new_tokens} tokens each, got {counts}")
    return steps


def rates(steps: Sequence[Step], batch: int, job: Job) -> dict[str, float]:
    """Tokens a second while every request decodes: from SETTLED tokens of the last one to the
    first one's end. The prefill's rate is from the start to the last one's first token."""
    window = [s for s in steps if s.fewest >= SETTLED and s.most < job.new_tokens]
    if len(window) < 2:
        raise RuntimeError(f"no time in which all {batch} requests decode: ask for more tokens")
    first, last = window[0], window[-1]
    tokens_s = (last.total - first.total) / (last.seconds - first.seconds)
    prefilled = next(s for s in steps if s.fewest >= 1)
    seconds = prefilled.seconds - steps[0].seconds
    return {
        "tokens_s": round(tokens_s, 1),
        "step_ms": round(1e3 * batch / tokens_s, 3),
        "timed_steps": round((last.total - first.total) / batch),
        "prefill_tokens_s": round(batch * job.prompt_tokens / seconds),
    }
