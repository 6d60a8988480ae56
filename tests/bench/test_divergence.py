"""KL of generated text: against what eval computes, over time slices, and bits found by time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pagedweight.bench.client import Answer
from pagedweight.bench.divergence import Written, mean_bits, mean_kl, traced_bits
from pagedweight.bench.load import Ask
from pagedweight.checkpoint.plan import uniform_plan
from pagedweight.eval.reference import load_plain, load_quantized
from pagedweight.eval.statistics import window_kl
from pagedweight.runtime.timeline import Timeline
from pagedweight.runtime.trace import BitTrace
from quantized import make_quantized
from timelines import FIRST, HEADER

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    out = tmp_path_factory.mktemp("divergence") / "out"
    checkpoint, _ = make_quantized(out)
    return checkpoint, load_plain(out.with_name("out-source"), torch.float32, CPU)


def written(seed, start, prompt=5, generated=12):
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, 90, prompt + generated))
    return Written(tokens, start + 0.1 * np.arange(generated))


def test_one_answer_is_a_window_of_eval(both):
    checkpoint, source = both
    plan = uniform_plan(checkpoint, 3)
    model = load_quantized(checkpoint, plan, torch.float32, CPU)
    one = written(1, 0.0, prompt=1, generated=16)  # all positions but the first are generated
    wanted = window_kl(source.logits(one.tokens), model.logits(one.tokens))
    assert mean_kl(source, checkpoint, [one], lambda time: plan) == pytest.approx(wanted, rel=1e-5)


def test_each_token_counts_at_the_bits_of_its_time(both):
    checkpoint, source = both
    low, high = uniform_plan(checkpoint, 2), uniform_plan(checkpoint, 6)
    early, late = written(1, 0.0), written(2, 100.0)
    apart = [
        mean_kl(source, checkpoint, [one], lambda time, plan=plan: plan)
        for one, plan in ((early, low), (late, high))
    ]
    together = mean_kl(
        source, checkpoint, [late, early], lambda time: low if time < 50 else high, slices=2
    )
    assert together == pytest.approx(np.mean(apart), rel=1e-5)
    same = mean_kl(source, checkpoint, [early, late], lambda time: low, slices=5)
    assert same == pytest.approx(mean_kl(source, checkpoint, [early, late], lambda time: low))


def test_text_is_tokens_again_and_shares_the_arrivals():
    answer = Answer(Ask(0, "a", (7, 8), 4), 10.0, (11.0, 12.0, 13.0, 14.0), 4, "abc", "")
    found = Written.of(answer, lambda text: [ord(letter) for letter in text])
    assert found.tokens.tolist() == [7, 8, 97, 98, 99]
    assert found.times.tolist() == [11.0, 13.0, 14.0]


def test_bits_by_time_come_from_timeline_and_trace(both):
    checkpoint, _ = both
    rows = uniform_plan(checkpoint, 6).size
    start = (tuple(range(rows)), (6,) * rows)
    trace = BitTrace({0: start, 5: ((0,), (4,)), 9: ((1, 2), (3, 2)), 20: ((0, 1, 2), (6, 6, 6))})
    plans = [uniform_plan(checkpoint, 6).ravel() for _ in range(4)]
    plans[1][0] = 4
    plans[2][:3] = 4, 3, 2
    shape = uniform_plan(checkpoint, 6).shape
    means = [mean_bits(checkpoint, plan.reshape(shape)) for plan in plans]
    # The server passed through other means while it was idle; the trace does not have them.
    idle = (means[2] + means[3]) / 2
    samples = tuple(
        replace(FIRST, monotonic=at, bits=round(mean, 4))
        for at, mean in ((0, means[0]), (10, means[1]), (11, means[2]), (20, idle), (30, means[3]))
    )
    bits_at = traced_bits(checkpoint, Timeline("t", HEADER, samples, False), trace)
    expected = ((-1, 0), (9.9, 0), (10.5, 1), (12, 2), (25, 2), (31, 3))
    for time, state in expected:
        assert bits_at(time).ravel().tolist() == plans[state].tolist(), time
