"""Likelihood, divergence and intervals against their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.eval.statistics import bootstrap, perplexity, window_kl, window_nll


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
