"""Windows of a text in their order through policies side by side, strictly causal.

A window is scored at bits chosen from what was computed before it: earlier windows of the same
text, decayed as the runtime decays steps, the first window from calibration alone. With
`replan_tokens` a window is cut into pieces of so many tokens, and each piece is scored at bits
chosen after the piece before it, over KV computed at the bits of its own time: what a server does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagedweight.core.calibration import Calibration
from pagedweight.core.policies import Assignment, PrecisionPolicy
from pagedweight.core.size_table import SizeTable
from pagedweight.eval.fleet import Fleet, Seat
from pagedweight.eval.statistics import Floats
from pagedweight.runtime.messages import Signals
from pagedweight.runtime.signals import SignalWindow

Progress = Callable[[int, int], None]
"""Called with windows done and windows in all."""
_ELEMENTS = 1 << 25
"""Logits whose distributions are in memory at once."""


@dataclass(frozen=True)
class StreamOptions:
    """top_k: of the router. prior_tokens: of the policy. replan_tokens: tokens of a piece; None:
    the whole window. seats: how many models run side by side. seconds: no window begins later."""

    top_k: int
    replan_tokens: int | None = None
    seats: int = 8
    seconds: float = float("inf")


@dataclass(frozen=True, eq=False)
class Lane:
    """One policy at one budget. prior_tokens: see `Policy`. before: called with each window's
    number before the policy is asked for its bits."""

    name: str
    policy: PrecisionPolicy
    calibration: Calibration
    prior_tokens: float
    before: Callable[[int], None] = lambda _: None


@dataclass(frozen=True, eq=False)
class Held:
    """What a lane held, by window (means over its pieces): resident and read bytes, mean bits."""

    resident: Floats
    read: Floats
    bits: Floats

    def first(self, count: int) -> Held:
        """The first windows' alone."""
        return Held(self.resident[:count], self.read[:count], self.bits[:count])


@dataclass(frozen=True, eq=False)
class StreamScores:
    """By window, nats: base_nll [n]; nll and kl [lanes, n]; what each lane held.

    plans: the assignment of every window's last piece, by lane.
    """

    base_nll: Floats
    nll: Floats
    kl: Floats
    held: list[Held]
    plans: list[list[Assignment]]


def score_stream(
    fleet: Fleet,
    lanes: Sequence[Lane],
    tokens: torch.Tensor,
    sizes: SizeTable,
    options: StreamOptions,
    progress: Progress,
) -> StreamScores:
    """Run windows [n, W] of one text through the source and every lane.

    Scores have fewer than n windows, the first ones, when `options.seconds` ended before.
    """
    count, end = len(tokens), time.monotonic() + options.seconds
    runners = [_Runner(lane, sizes, options.top_k, count) for lane in lanes]
    base_nll = np.empty(count)
    for number, window in enumerate(tokens):
        if number and time.monotonic() > end:
            count = number
            break
        truth: list[torch.Tensor] = []
        groups = [runners[i : i + options.seats] for i in range(0, len(runners), options.seats)]
        for at, group in enumerate(groups or [[]]):
            nll = _score_window(fleet, group, window, truth, options, at == 0)
            if at == 0:
                base_nll[number] = nll
        for runner in runners:
            runner.end_window(number, len(window) - 1)
        progress(number + 1, count)
    return StreamScores(
        base_nll[:count],
        np.array([runner.nll[:count] for runner in runners]).reshape(-1, count),
        np.array([runner.kl[:count] for runner in runners]).reshape(-1, count),
        [runner.held.first(count) for runner in runners],
        [runner.plans for runner in runners],
    )


def _score_window(
    fleet: Fleet,
    group: list[_Runner],
    window: torch.Tensor,
    truth: list[torch.Tensor],
    options: StreamOptions,
    first: bool,
) -> float:
    """One window for one group of lanes; the first brings the source's log p along into `truth`.

    Returns the source's mean nll (of the first group only).
    """
    size, predictions = options.replan_tokens or len(window), len(window) - 1
    cache = fleet.cache() if size < len(window) else None
    total = 0.0
    for piece, start in enumerate(range(0, len(window), size)):
        seats: list[Seat] = [None] if first else []
        seats += [runner.choose() for runner in group]
        found = fleet.run(window[start : start + size], seats, cache)
        last = min(start + size, predictions)
        answers = window[start + 1 : last + 1].to(found.logits.device)
        if first:
            truth.append(torch.log_softmax(found.logits[0, : len(answers)].float(), -1))
            total += _nll(truth[-1], answers)
        skip = int(first)
        for runner, logits, signals in zip(
            group, found.logits[skip:], found.signals[skip:], strict=True
        ):
            runner.hear(logits[: len(answers)], truth[piece], answers, signals)
    return total / predictions


class _Runner:
    """A lane at work: its signals, and what its windows came to."""

    def __init__(self, lane: Lane, sizes: SizeTable, top_k: int, windows: int) -> None:
        self.nll, self.kl = np.empty(windows), np.empty(windows)
        self.held = Held(*(np.empty(windows) for _ in range(3)))
        self.plans: list[Assignment] = []
        self._lane = lane
        self._sizes = sizes
        self._signals = SignalWindow(lane.calibration, top_k, lane.prior_tokens, refresh_steps=1)
        self._steps = 0
        self._sums: list[torch.Tensor] = []
        self._pieces: list[Assignment] = []

    def choose(self) -> Assignment:
        """The policy's bits for the next piece, from the signals so far."""
        self._steps += 1
        if not self._pieces:
            self._lane.before(len(self.plans))
        self._pieces.append(self._lane.policy.assign(self._signals.current(self._steps)))
        return self._pieces[-1]

    def hear(
        self, logits: torch.Tensor, log_p: torch.Tensor, answers: torch.Tensor, signals: Signals
    ) -> None:
        """Score a piece, and only then learn from it."""
        self._sums.append(_sums(logits, log_p, answers))
        self._signals.add(signals)

    def end_window(self, number: int, predictions: int) -> None:
        """Add the pieces up."""
        totals = torch.stack(self._sums).sum(dim=0).cpu().numpy() / predictions
        self.nll[number], self.kl[number] = totals
        sizes, pieces = self._sizes, self._pieces
        self.held.resident[number] = np.mean([p.resident_bytes(sizes) for p in pieces])
        self.held.read[number] = np.mean([p.read_bytes(sizes) for p in pieces])
        self.held.bits[number] = np.mean([p.mean_bits(sizes) for p in pieces])
        self.plans.append(pieces[-1])
        self._sums, self._pieces = [], []


def _sums(logits: torch.Tensor, log_p: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Sums over positions of -log q(answer) and KL(p || q), float64 [2] on the device."""
    total = torch.zeros(2, dtype=torch.float64, device=logits.device)
    step = max(1, _ELEMENTS // logits.shape[-1])
    for at in range(0, len(answers), step):
        part = slice(at, at + step)
        log_q = torch.log_softmax(logits[part].float(), -1)
        total[0] -= log_q.gather(1, answers[part, None]).sum(dtype=torch.float64)
        gap = log_p[part] - log_q
        total[1] += (log_p[part].exp() * gap).sum(dtype=torch.float64)
    return total


def _nll(log_p: torch.Tensor, answers: torch.Tensor) -> float:
    return -float(log_p.gather(1, answers[:, None]).sum(dtype=torch.float64))
