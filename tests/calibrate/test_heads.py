"""Residual heads: recovered where they exist, honest where they do not."""

from __future__ import annotations

import numpy as np

from pagedweight.calibrate.heads import PRIOR_TOKENS, Regression, Samples, fit_heads
from pagedweight.calibrate.measurements import SEGMENTS, Measurements
from pagedweight.core.residual import log_features, predict_residual

LEVELS = 4
WEIGHT = np.array([[0.9, 0.0, 0.3], [0.2, 0.7, 0.0]])
"""By kind: what one log feature does to log damage."""
LENGTH = 10_000
"""Long segments, so that the prior hardly shows."""


def made(noise: float, sequences: int = 24, seed: int = 0) -> Measurements:
    """Damage that is log-linear in un-normalized features, with log-normal noise."""
    rng = np.random.default_rng(seed)
    layers, experts = 3, 8
    shape = (sequences, SEGMENTS, layers, experts, 2)
    drift = rng.normal(0, 0.5, (sequences, 1, layers, experts, 2, 3))
    usual = rng.uniform(0.2, 3.0, (layers, experts, 2, 3))
    rate = usual * np.exp(np.broadcast_to(drift, (*shape, 3)))
    features = rate * np.array([LENGTH, LENGTH, 1.0])
    damage = np.exp((drift * WEIGHT[:, None, :].transpose(1, 0, 2)[0]).sum(-1))
    damage = damage * np.exp(rng.normal(0, noise, (sequences, 1, layers, experts, 2)))
    levels = 4.0 ** -np.arange(LEVELS)
    whole = np.broadcast_to(damage, shape)[..., None] * levels * LENGTH
    mass = np.full((sequences, SEGMENTS, layers, experts), 1.0, np.float32)
    return Measurements(
        length=np.full((sequences, SEGMENTS), LENGTH),
        routed=mass * 10,
        mass=mass,
        features=features.astype(np.float32),
        damage=np.ascontiguousarray(whole),
    )


def test_heads_are_recovered() -> None:
    fit = fit_heads(made(noise=0.0))
    for kind in range(2):
        for step in range(LEVELS - 1):
            np.testing.assert_allclose(fit.heads.weight[kind, step], WEIGHT[kind], atol=0.06)
    assert (fit.r2 > 0.97).all()
    np.testing.assert_allclose(fit.heads.confidence, fit.r2, rtol=1e-6)


def test_confidence_is_the_share_that_features_explain() -> None:
    """Noise of the same variance as the signal leaves half of it to explain."""
    signal = 0.5 * np.sqrt((WEIGHT**2).sum(1))
    fit = fit_heads(made(noise=float(signal.mean()), sequences=60))
    assert fit.r2.min() > 0.4
    assert fit.r2.max() < 0.62


def test_without_relation_confidence_is_nought() -> None:
    measured = made(noise=0.0)
    rng = np.random.default_rng(5)
    shuffled = rng.permuted(measured.features, axis=0)
    fit = fit_heads(Measurements(**{**vars(measured), "features": shuffled}))
    assert (fit.heads.confidence < 0.05).all()
    assert (fit.heads.confidence >= 0).all()


def test_one_sequence_holds_nothing_out() -> None:
    fit = fit_heads(made(noise=0.1, sequences=1))
    assert not fit.heads.confidence.any()
    assert np.isfinite(fit.heads.weight).all()


def test_a_block_without_tokens_is_finite() -> None:
    measured = made(noise=0.1)
    features, damage = measured.features.copy(), measured.damage.copy()
    features[:, :, 1, 3] = 0
    damage[:, :, 1, 3] = 0
    features[:4, :, 0, 2] = 0  # unseen in some sequences only
    damage[:4, :, 0, 2] = 0
    fit = fit_heads(Measurements(**{**vars(measured), "features": features, "damage": damage}))
    for array in fit.heads.to_arrays().values():
        assert np.isfinite(array).all()


def test_center_is_the_mean_of_log_features() -> None:
    measured = made(noise=0.1)
    fit = fit_heads(measured)
    phi = [
        log_features(one.features, one.tokens, fit.heads.center)
        for one in map(measured.signals, range(measured.sequences))
    ]
    np.testing.assert_allclose(np.mean(phi, axis=0), 0, atol=0.02)


def test_prediction_is_the_planners() -> None:
    """What was fitted is what `core.residual` computes from the same signals."""
    measured = made(noise=0.1)
    samples = Samples.of(measured)
    regression = Regression.fit(samples)
    heads = fit_heads(measured).heads
    signals = measured.signals(3)
    phi = log_features(signals.features, signals.tokens, heads.center, PRIOR_TOKENS)
    ours = regression.predict(samples)[3]  # [L, E, 2, T]
    theirs = predict_residual(heads, phi).reshape(LEVELS - 1, *ours.shape[:3])
    np.testing.assert_allclose(np.moveaxis(theirs, 0, -1), ours, atol=1e-4)


def test_clip_bounds_are_inside_out_never() -> None:
    heads = fit_heads(made(noise=0.3)).heads
    assert (heads.clip[..., 0] < 0).all()
    assert (heads.clip[..., 1] > 0).all()
