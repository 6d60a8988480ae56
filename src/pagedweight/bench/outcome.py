"""What one run under load was like: answers of the client and the server's timeline in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedweight.bench.client import Answer
from pagedweight.bench.load import Load
from pagedweight.runtime.timeline import Timeline

BACK = 0.05


@dataclass(frozen=True)
class Latency:
    """Milliseconds: time to the first token and time between tokens, over a set of answers."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float

    @staticmethod
    def of(answers: Sequence[Answer]) -> Latency:
        """Of answers that are whole; ValueError when there are none."""
        whole = [answer for answer in answers if not answer.fault]
        if not whole:
            raise ValueError("no answer is whole")
        first = [answer.first for answer in whole]
        gaps = [gap for answer in whole for gap in answer.gaps]
        both = [*np.percentile(first, [50, 99]), *np.percentile(gaps or [0.0], [50, 99])]
        return Latency(*(round(1000 * float(value), 1) for value in both))


@dataclass(frozen=True)
class PhaseRow:
    """One phase of the load: requests sent in it, tokens a second that came in it (whosever), and
    the latencies of its requests; None where it had none."""

    name: str
    requests: int
    tokens_per_s: float
    latency: Latency | None


@dataclass(frozen=True)
class Outcome:
    """One run. Bits are means by weight of what kernels read, `mean` ones over time; what only a
    timeline says is None where there is none (vLLM's own models).

    lost:             requests with an error, or with more or fewer tokens than asked for.
    preemptions:      vLLM's own counter. above_floor: those of them that came although bits had
                      not given all that floors allow (from the timeline; always 0 at fixed bits).
    tokens_per_s:     generated tokens from the first request to the last token.
    peak_tokens_per_s: generated from the start of the peak phase until its last request is
                      answered, by these seconds. peak_s: these seconds.
    peak_mean_bits:   over the same time; peak: latencies of its requests.
    mean_damage:      predicted damage (eq. 8) against every stored bit, over time: from the first
                      request to the last token, calm phases included.
    measured_s:       that time. most_damage: the largest in it.
    bits_back_s:      from the moment when the last request of the peak is answered until bits are
                      those of the start, until the phase after the next begins; 0 when they were so
                      before, None when they were not by then.
    phases:           in their order.
    """

    requests: int
    lost: int
    preemptions: int
    above_floor: int | None
    mean_bits: float | None
    lowest_bits: float | None
    start_bits: float | None
    peak_mean_bits: float | None
    mean_damage: float | None
    most_damage: float | None
    measured_s: float
    tokens_per_s: float
    peak_tokens_per_s: float
    peak_s: float
    bits_back_s: float | None
    kv_blocks_start: int | None
    kv_blocks_most: int | None
    most_running: int | None
    copied_bytes: int | None
    rollbacks: int | None
    all: Latency
    peak: Latency
    phases: tuple[PhaseRow, ...]


def time_mean(timeline: Timeline, name: str, start: float, end: float) -> float:
    """Mean of a field between two monotonic times: a sample holds until the next one."""
    times = timeline.column("monotonic")
    values = timeline.column(name)
    at = np.searchsorted(times, start, side="right") - 1
    inside = (times > start) & (times < end)
    edges = np.concatenate([[start], times[inside], [end]])
    held = np.concatenate([[values[max(at, 0)]], values[inside]])
    return float(np.average(held, weights=np.diff(edges)))


def back_after(timeline: Timeline, since: float, until: float = float("inf")) -> float | None:
    """Seconds from the monotonic time `since` until bits are those of the start, and remain so
    until `until`.

    "Those of the start" is `BACK` of a bit below their mean at most: which rows come back first
    depends on what was routed, and the last bytes of a budget may not fit the row that is left.
    """
    times, bits = timeline.column("monotonic"), timeline.column("bits")
    begin, bits = bits[0], bits[times < until]
    below = np.flatnonzero(bits < begin - BACK)
    if not below.size:
        return 0.0
    if below[-1] + 1 == len(bits):
        return None
    return round(max(0.0, float(times[below[-1] + 1]) - since), 2)


def tokens_between(answers: Sequence[Answer], start: float, end: float) -> float:
    """Tokens that arrived in a span of monotonic time; a piece of text counts as its share."""
    total = 0.0
    for answer in answers:
        if not answer.fault:
            here = sum(start <= at <= end for at in answer.arrivals)
            total += here * answer.tokens / len(answer.arrivals)
    return total


def phase_rows(load: Load, answers: Sequence[Answer], begin: float) -> tuple[PhaseRow, ...]:
    """A row for every phase; `begin`: monotonic time at which the load started."""
    rows = []
    for phase, (start, end) in zip(load.phases, load.spans, strict=True):
        own = [answer for answer in answers if start <= answer.ask.at < end]
        whole = any(not answer.fault for answer in own)
        came = tokens_between(answers, begin + start, begin + end) / phase.seconds
        latency = Latency.of(own) if whole else None
        rows.append(PhaseRow(phase.name, len(own), round(came, 1), latency))
    return tuple(rows)


def preempted_above_floor(timeline: Timeline) -> int:
    """Preemptions at steps at which the floors still left blocks to back."""
    left = timeline.column("kv_reachable") - timeline.column("kv_usable")
    happened = np.diff(timeline.column("preemptions"), prepend=0)
    return int(happened[left > 0].sum())


def outcome(
    load: Load, peak: str, answers: Sequence[Answer], timeline: Timeline | None, preemptions: int
) -> Outcome:
    """The row of a run. ValueError when nothing was answered in the peak phase."""
    begin = answers[0].sent - answers[0].ask.at
    last = max(answer.arrivals[-1] for answer in answers)
    peak_start = begin + load.span(peak)[0]
    of_peak = [answer for answer in answers if answer.ask.phase == peak]
    peak_answered = max(answer.arrivals[-1] for answer in of_peak)
    tokens = sum(answer.tokens for answer in answers if not answer.fault)
    in_peak = tokens_between(answers, peak_start, peak_answered)
    return Outcome(
        requests=len(answers),
        lost=sum(bool(answer.fault) for answer in answers),
        preemptions=preemptions,
        tokens_per_s=round(tokens / (last - begin), 1),
        peak_tokens_per_s=round(in_peak / (peak_answered - peak_start), 1),
        peak_s=round(peak_answered - peak_start, 2),
        all=Latency.of(answers),
        peak=Latency.of(of_peak),
        measured_s=round(last - begin, 2),
        phases=phase_rows(load, answers, begin),
        **_of_timeline(
            timeline, (begin, last), (peak_start, peak_answered), begin + load.calm_after(peak)
        ),
    )


_Span = tuple[float, float]
_ONLY_TIMELINE = (
    "above_floor", "mean_bits", "lowest_bits", "start_bits", "peak_mean_bits", "mean_damage",
    "most_damage", "bits_back_s", "kv_blocks_start", "kv_blocks_most", "most_running",
    "copied_bytes", "rollbacks",
)  # fmt: skip


def _of_timeline(
    timeline: Timeline | None, whole: _Span, peak: _Span, until: float
) -> dict[str, Any]:
    """Fields of `Outcome` from `whole` and `peak`, monotonic times from and to; `until`: when the
    load rises again after the peak."""
    if timeline is None:
        return dict.fromkeys(_ONLY_TIMELINE)
    bits, usable = timeline.column("bits"), timeline.column("kv_usable")
    return {
        "above_floor": preempted_above_floor(timeline),
        "mean_bits": round(time_mean(timeline, "bits", *whole), 3),
        "lowest_bits": float(bits.min()),
        "start_bits": float(bits[0]),
        "peak_mean_bits": round(time_mean(timeline, "bits", *peak), 3),
        "mean_damage": float(f"{time_mean(timeline, 'damage', *whole):.4g}"),
        "most_damage": float(f"{timeline.column('damage').max():.4g}"),
        "bits_back_s": back_after(timeline, peak[1], until),
        "kv_blocks_start": int(usable[0]),
        "kv_blocks_most": int(usable.max()),
        "most_running": int(timeline.column("running").max()),
        "copied_bytes": timeline.samples[-1].copied_bytes,
        "rollbacks": timeline.samples[-1].rollbacks,
    }
