"""The row of a run, from answers and a timeline whose numbers are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagedweight.bench.client import Answer, answer_of
from pagedweight.bench.load import Ask, Load, Phase
from pagedweight.bench.outcome import (
    Latency,
    back_after,
    outcome,
    phase_rows,
    preempted_above_floor,
    time_mean,
    tokens_between,
)
from pagedweight.runtime.timeline import Timeline
from timelines import FIRST, HEADER, burst

LOAD = Load((Phase("calm", 2, 1.0), Phase("burst", 3, 5.0), Phase("calm", 5, 1.0)), (4, 4), (4, 4))


def ask(at, phase, output=4):
    return Ask(at, phase, (1, 2, 3, 4), output)


def answer(at, phase, first=0.5, gap=0.1, fault="", tokens=4):
    """Sent 150 s after the timeline's clock began plus `at`; four pieces of text."""
    sent = 150.0 + at
    arrivals = tuple(sent + first + n * gap for n in range(4))
    return Answer(ask(at, phase), sent, arrivals, tokens, "text", fault)


def timeline_of(samples):
    return Timeline("test", HEADER, tuple(samples), truncated=False)


def steps(*pairs, **more):
    """Samples of (monotonic, bits)."""
    return timeline_of(
        replace(FIRST, monotonic=at, step=n, bits=bits, **{k: v[n] for k, v in more.items()})
        for n, (at, bits) in enumerate(pairs)
    )


def test_a_sample_holds_until_the_next():
    found = steps((0, 6.0), (10, 4.0), (14, 5.0))
    assert time_mean(found, "bits", 0, 14) == pytest.approx((10 * 6 + 4 * 4) / 14)
    assert time_mean(found, "bits", 9, 15) == pytest.approx((6 + 4 * 4 + 5) / 6)
    assert time_mean(found, "bits", 20, 30) == 5.0
    assert time_mean(found, "bits", -5, 5) == 6.0


def test_when_bits_are_back():
    fell = steps((0, 6.0), (10, 4.0), (14, 5.0), (17, 5.98))
    assert back_after(fell, 12.0) == 5.0
    assert back_after(fell, 30.0) == 0.0
    assert back_after(steps((0, 6.0), (10, 4.0)), 12.0) is None
    assert back_after(steps((0, 6.0), (10, 6.0)), 12.0) == 0.0
    assert back_after(steps((0, 6.0), (10, 5.9)), 12.0) is None  # one row of the tiny model


def test_bits_that_fall_again_later_were_back_all_the_same():
    twice = steps((0, 6.0), (10, 4.0), (17, 6.0), (30, 3.0), (35, 6.0))
    assert back_after(twice, 12.0) == 23.0
    assert back_after(twice, 12.0, until=30.0) == 5.0
    assert back_after(twice, 12.0, until=16.0) is None


def test_preemptions_that_bits_could_have_helped():
    found = steps(
        (0, 6.0),
        (1, 4.0),
        (2, 4.0),
        (3, 2.0),
        preemptions=[0, 2, 2, 7],
        kv_usable=[64, 120, 240, 240],
        kv_reachable=[240] * 4,
    )
    assert preempted_above_floor(found) == 2


def test_tokens_count_where_they_arrive():
    whole, lost = answer(0, "burst"), answer(0, "burst", fault="gone")
    assert tokens_between([whole, lost], 150.0, 160.0) == 4
    assert tokens_between([whole], 150.55, 150.75) == 2
    # two tokens in each piece of text
    assert tokens_between([replace(whole, tokens=8)], 150.55, 150.75) == 4


def test_latencies_are_in_milliseconds_and_over_whole_answers():
    slow = answer(0, "burst", first=9.0, fault="gone")
    found = Latency.of([answer(0, "burst"), answer(1, "burst", first=1.5, gap=0.3), slow])
    assert found.ttft_p50 == 1000.0
    assert found.ttft_p99 == pytest.approx(1490.0)
    assert found.itl_p50 == pytest.approx(200.0)
    with pytest.raises(ValueError, match="no answer is whole"):
        Latency.of([slow])


def test_a_phase_has_its_own_requests_and_whatever_tokens_come_in_it():
    answers = [answer(0.5, "calm"), answer(1.9, "calm"), answer(2.5, "burst")]
    calm, busy, quiet = phase_rows(LOAD, answers, 150.0)
    assert (calm.name, calm.requests, calm.tokens_per_s) == ("calm", 2, 2.0)  # 4 tokens in 2 s
    assert (busy.name, busy.requests, busy.tokens_per_s) == ("burst", 1, 2.7)  # 8 in 3
    assert busy.latency == Latency.of(answers[2:])
    assert (quiet.requests, quiet.tokens_per_s, quiet.latency) == (0, 0.0, None)


def test_gaps_are_of_tokens_when_pieces_have_several():
    assert answer(0, "calm").gaps == pytest.approx([0.1] * 3)
    assert answer(0, "calm", tokens=13).gaps == pytest.approx([0.025] * 3)  # 1 and 3 times 4


def test_the_whole_row():
    answers = [
        answer(0.5, "calm"),
        answer(2.5, "burst"),
        answer(4.0, "burst", first=1.0),
        answer(4.5, "burst", fault="3 tokens instead of 4", tokens=3),
        answer(8.0, "calm"),
    ]
    samples = burst(100, preempts=3)  # bits fall from 2.5 to 5 s, rise from 7.5 to 10 s
    found = outcome(LOAD, "burst", answers, timeline_of(samples), preemptions=3)
    assert (found.requests, found.lost, found.preemptions, found.above_floor) == (5, 1, 3, 3)
    assert found.tokens_per_s == pytest.approx(16 / 8.8, abs=0.1)  # 0 s to 8.8 s
    assert found.peak_s == pytest.approx(3.3)  # from 2 s to the last of 5.3 s
    assert found.peak_tokens_per_s == pytest.approx(8 / 3.3, abs=0.1)
    assert found.lowest_bits == pytest.approx(3.0)
    assert found.start_bits == 6.0
    assert 4.0 < found.mean_bits < 5.0
    assert found.bits_back_s == pytest.approx(4.7, abs=0.05)
    assert (found.kv_blocks_start, found.kv_blocks_most, found.most_running) == (64, 164, 4)
    assert found.measured_s == pytest.approx(8.8)
    assert found.most_damage == max(float(f"{s.damage:.4g}") for s in samples)
    assert [row.requests for row in found.phases] == [1, 3, 1]


def test_an_answer_is_whole_or_says_why_not():
    found = {
        "start_times": [5.0] * 3,
        "ttfts": [0.5, 0.5, 0.0],
        "itls": [[0.1, 0.2], [0.1], []],
        "output_lens": [3, 2, 0],
        "generated_texts": ["a b c", "a b", ""],
        "errors": ["", "", "Bad Gateway"],
    }
    asked = [ask(0, "burst", output=3)] * 3
    whole, short, failed = (answer_of(one, found, n) for n, one in enumerate(asked))
    assert whole.fault == ""
    assert whole.arrivals == pytest.approx((5.5, 5.6, 5.8))
    assert whole.first == 0.5
    assert whole.gaps == pytest.approx([0.1, 0.2])
    assert short.fault == "2 tokens instead of 3"
    assert failed.fault == "Bad Gateway"
