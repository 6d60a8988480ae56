"""What is computed from a window's logits, and how sure the averages are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]
RESAMPLES = 10_000
COVERAGE = 0.95
_CHUNK = 256
"""Positions whose float32 distributions are in memory at once."""


def window_nll(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    """Mean of -log p(next token), nats, over the window - 1 predictions: logits [W, V] -> float."""
    total = 0.0
    for first in range(0, len(tokens) - 1, _CHUNK):
        upto = min(first + _CHUNK, len(tokens) - 1)
        log_p = torch.log_softmax(logits[first:upto].float(), dim=-1)
        picked = log_p.gather(1, tokens[first + 1 : upto + 1, None])
        total -= float(picked.sum(dtype=torch.float64))
    return total / (len(tokens) - 1)


def window_kl(base: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over positions of KL(base || other) of next-token distributions, nats: logits [W, V].

    The same W - 1 positions as `window_nll`: those whose next token is in the window.
    """
    total, positions = 0.0, len(base) - 1
    for first in range(0, positions, _CHUNK):
        upto = min(first + _CHUNK, positions)
        log_p = torch.log_softmax(base[first:upto].float(), dim=-1)
        log_q = torch.log_softmax(other[first:upto].float(), dim=-1)
        total += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
    return total / positions


@dataclass(frozen=True)
class Estimate:
    """A mean over windows and the bootstrap interval that covers 95%."""

    mean: float
    low: float
    high: float


def bootstrap(values: Floats, seed: int) -> Estimate:
    """Percentile bootstrap of the mean over windows [windows], from 10,000 resamples by `seed`.

    Windows are what is drawn: tokens of one window are not independent.
    """
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, len(values), (RESAMPLES, len(values)))
    means = values[rows].mean(axis=1)
    low, high = np.quantile(means, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(float(values.mean()), float(low), float(high))


def perplexity(nll: Floats, seed: int) -> Estimate:
    """exp of the mean of windows' mean negative log-likelihoods, and of its interval's ends."""
    mean = bootstrap(nll, seed)
    return Estimate(*(float(np.exp(v)) for v in (mean.mean, mean.low, mean.high)))


def paired(
    ours: Sequence[Floats], theirs: Sequence[Floats], seed: int
) -> tuple[Estimate, Estimate]:
    """(difference, share): mean(ours) - mean(theirs), and that over mean(theirs), with intervals.

    Each is a list of texts [windows of the text]; the mean is over texts, each the mean of its
    windows, and windows are redrawn text by text, the same ones on both sides.
    """
    rng = np.random.default_rng(seed)
    means = np.zeros((2, RESAMPLES))
    for pair in zip(ours, theirs, strict=True):
        rows = rng.integers(0, len(pair[0]), (RESAMPLES, len(pair[0])))
        means += np.array([values[rows].mean(axis=1) for values in pair]) / len(ours)
    point = np.array([np.mean([text.mean() for text in side]) for side in (ours, theirs)])
    found = []
    for drawn, value in (
        (means[0] - means[1], point[0] - point[1]),
        (means[0] / means[1] - 1, point[0] / point[1] - 1),
    ):
        low, high = np.quantile(drawn, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
        found.append(Estimate(float(value), float(low), float(high)))
    return found[0], found[1]


def over_texts(values: Sequence[Floats], seed: int) -> Estimate:
    """Mean over texts of the means of their windows, windows redrawn text by text."""
    rng = np.random.default_rng(seed)
    means = np.zeros(RESAMPLES)
    for text in values:
        rows = rng.integers(0, len(text), (RESAMPLES, len(text)))
        means += text[rows].mean(axis=1) / len(values)
    low, high = np.quantile(means, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Estimate(float(np.mean([text.mean() for text in values])), float(low), float(high))
