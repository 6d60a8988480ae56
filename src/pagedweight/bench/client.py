"""Asks a server by vLLM's own benchmark client (what `vllm bench serve` runs), keeps every time.

`vllm bench serve --dataset-name timed_trace` sends requests at times of a file, but makes prompts
of random tokens, which route like no text. So the client is called with requests of our own.
Relies on: vllm.benchmarks.serve.{benchmark, TaskType}, vllm.benchmarks.datasets.SampleRequest with
`timestamp`, and the detailed lists that `benchmark` returns. Tested with vLLM 0.32; 0.26 has the
same.
"""

from __future__ import annotations

import asyncio
import io
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedweight.bench.load import Ask
from pagedweight.errors import UserError


@dataclass(frozen=True)
class Answer:
    """What came back for one request. Times are of the monotonic clock, in seconds.

    arrivals: of each piece of text, first to last; tokens: generated in all; fault: empty when the
    answer is whole: no error, and exactly as many tokens as asked for (so it ended by length).
    """

    ask: Ask
    sent: float
    arrivals: tuple[float, ...]
    tokens: int
    text: str
    fault: str

    @property
    def first(self) -> float:
        """Time to the first token, seconds."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Inter-token times, seconds: between pieces, by the tokens that a piece has on average (1
        unless the server was given a --stream-interval)."""
        pieces = max(1, len(self.arrivals) - 1)
        share = pieces / max(pieces, self.tokens - 1)
        return [(b - a) * share for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def ask_all(url: str, model: Path, asks: Sequence[Ask], temperature: float = 0.0) -> list[Answer]:
    """Send every request at its time, without an early end; wait for all answers."""
    with _quietly():
        from vllm.benchmarks.datasets import SampleRequest
        from vllm.benchmarks.serve import TaskType, benchmark

    requests = [
        SampleRequest(
            prompt=list(ask.prompt),
            prompt_len=len(ask.prompt),
            expected_output_len=ask.output,
            request_id=f"ask-{number}",
            timestamp=ask.at,
        )
        for number, ask in enumerate(asks)
    ]
    run = benchmark(
        task_type=TaskType.GENERATION,
        endpoint_type="openai",
        api_url=f"{url}/v1/completions",
        base_url=url,
        model_id=str(model),
        model_name=str(model),
        tokenizer=_tokenizer(model),
        input_requests=requests,
        logprobs=None,
        request_rate=float("inf"),
        burstiness=1.0,
        disable_tqdm=True,
        num_warmups=0,
        profile=False,
        selected_percentile_metrics=[],
        selected_percentiles=[],
        ignore_eos=True,
        goodput_config_dict={},
        max_concurrency=None,
        lora_modules=None,
        extra_headers=None,
        extra_body={"temperature": temperature},
        ready_check_timeout_sec=0,
        self_timed=True,
    )
    with redirect_stdout(io.StringIO()):
        found = asyncio.run(run)
    return [answer_of(ask, found, number) for number, ask in enumerate(asks)]


@contextmanager
def _quietly() -> Iterator[None]:
    """vLLM warns of what it lacks while it is imported; the client misses none of it."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def answer_of(ask: Ask, found: dict[str, Any], number: int) -> Answer:
    """Answer `number` of what vLLM's `benchmark` returns."""
    sent, tokens = found["start_times"][number], found["output_lens"][number]
    arrivals = [sent + found["ttfts"][number]]
    for gap in found["itls"][number]:
        arrivals.append(arrivals[-1] + gap)
    fault = found["errors"][number]
    if not fault and tokens != ask.output:
        fault = f"{tokens} tokens instead of {ask.output}"
    return Answer(ask, sent, tuple(arrivals), tokens, found["generated_texts"][number], fault)


def has_tokenizer(model: Path) -> bool:
    """Whether a model folder has a tokenizer; random weights have none, and are asked in tokens."""
    return any((model / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))


def _tokenizer(model: Path) -> Any:
    """None without one: the server then counts the tokens itself, and answers no text."""
    if not has_tokenizer(model):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def check_clock() -> None:
    """The client's times and the timeline's must be of one clock: so on Linux."""
    if abs(time.perf_counter() - time.monotonic()) > 1.0:
        raise UserError("perf_counter and monotonic are different clocks on this system")
