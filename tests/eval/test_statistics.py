"""Likelihood, divergence and intervals against their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.eval.statistics import (
    bootstrap,
    over_texts,
    paired,
    perplexity,
    window_kl,
    window_nll,
)


def _logits(seed, window=300, vocabulary=23, scale=3.0):
    return torch.randn(window, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**31), st.integers(2, 600))
def test_nll_and_kl_are_the_definitions(seed, window):
    p, q = _logits(seed, window), _logits(seed + 1, window)
    tokens = torch.randint(0, 23, (window,), generator=torch.Generator().manual_seed(seed))
    log_p, log_q = (torch.log_softmax(v.double(), 1)[:-1] for v in (p, q))
    nll = -log_p[torch.arange(window - 1), tokens[1:]].mean()
    assert window_nll(p, tokens) == pytest.approx(float(nll), rel=1e-6)
    kl = (log_p.exp() * (log_p - log_q)).sum(1).mean()
    assert window_kl(p, q) == pytest.approx(float(kl), rel=1e-5)


def test_kl_of_a_model_to_itself_is_zero_and_to_a_shift_too():
    logits = _logits(1)
    assert window_kl(logits, logits) == 0
    assert abs(window_kl(logits, logits + 5)) < 1e-6
    assert window_kl(logits, _logits(1, scale=3.1)) > 1e-4


def test_bootstrap_repeats_covers_and_narrows():
    values = np.random.default_rng(0).normal(2.0, 1.0, 400)
    first, again = bootstrap(values, 1), bootstrap(values, 1)
    assert first == again
    assert first.low < values.mean() == first.mean < first.high
    expected = 2 * 1.96 * values.std() / np.sqrt(400)
    assert first.high - first.low == pytest.approx(expected, rel=0.1)
    assert bootstrap(np.full(5, 3.0), 0).low == 3.0


def test_perplexity_of_an_even_guess_is_the_vocabulary():
    nll = np.array([window_nll(torch.zeros(9, 50), torch.arange(9))])
    assert perplexity(nll, 0).mean == pytest.approx(50, rel=1e-6)


def texts(seed, factor=1.0, noise=0.0):
    """Windows of three texts of unlike sizes and levels, and the same ones scaled and disturbed."""
    rng = np.random.default_rng(seed)
    base = [rng.lognormal(level, 1.0, count) for level, count in ((0, 30), (2, 7), (-1, 60))]
    return base, [text * factor * rng.lognormal(0, noise, len(text)) for text in base]


def test_paired_sees_through_what_both_sides_share():
    base, ours = texts(1, 0.9, 0.02)
    difference, share = paired(ours, base, 0)
    wanted = [np.mean([t.mean() for t in side]) for side in (ours, base)]
    assert difference.mean == pytest.approx(wanted[0] - wanted[1])
    assert share.mean == pytest.approx(wanted[0] / wanted[1] - 1)
    assert -0.12 < share.low <= share.mean <= share.high < -0.08
    assert difference.low <= difference.mean <= difference.high < 0
    alone = over_texts(base, 0)
    assert alone.high - alone.low > 5 * (difference.high - difference.low)


def test_texts_weigh_the_same_whatever_their_length():
    base, _ = texts(2)
    found = over_texts(base, 0)
    assert found.mean == pytest.approx(np.mean([text.mean() for text in base]))
    assert found.low < found.mean < found.high
    one = over_texts(base[:1], 3)
    plain = bootstrap(base[0], 3)
    assert (one.mean, one.low, one.high) == pytest.approx((plain.mean, plain.low, plain.high))
    same = paired(base, base, 0)
    assert [same[0].mean, same[0].low, same[1].high] == [0, 0, 0]
