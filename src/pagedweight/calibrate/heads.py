"""Prompt residual heads (eqs. 5 and 6) fitted to measured damage of sequences.

A sample is a linear block in a sequence. Its target is the log of what a step costs there over what
it costs on average; its features are those of `core.residual.log_features`. Both have the same
PRIOR_TOKENS of the average mixed in, so that a block which few tokens reached says little instead
of minus infinity. One ridge regression for each kind and step, over all blocks of the kind.

What is held out is whole sequences: center, average and head come from the others. The share of
variance that is explained there is the confidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedweight.calibrate.measurements import FloatArray, Measurements
from pagedweight.core.geometry import KINDS
from pagedweight.core.residual import FEATURES, TINY, ResidualHeads, log_features

PRIOR_TOKENS = 256.0
RIDGE = 0.01
"""Added to the features' covariance, as a share of its mean diagonal: sum r|x| and sum r|x|^2 are
nearly one feature where inputs are normalized, and large opposite weights do not carry over."""
FOLDS = 4
CLIP_SHARE = 0.002
"""Share of targets beyond each clip bound."""
Phi = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class HeadFit:
    """heads; r2: float64 [2, T], on held-out sequences (not clipped at 0); spread: float64 [2, T],
    standard deviation of the targets, in nats."""

    heads: ResidualHeads
    r2: FloatArray
    spread: FloatArray


@dataclass(frozen=True, eq=False)
class Samples:
    """n sequences: features [n, L, E, 2, 3], tokens [n], damage of each step [n, L, E, 2, T]."""

    features: NDArray[np.float32]
    tokens: FloatArray
    damage: FloatArray

    @staticmethod
    def of(measured: Measurements) -> Samples:
        signals = [measured.signals(number) for number in range(measured.sequences)]
        damage = measured.damage.sum(1)
        return Samples(
            features=np.stack([s.features for s in signals if s.features is not None]),
            tokens=np.array([s.tokens for s in signals]),
            damage=np.maximum(damage[..., :-1] - damage[..., 1:], 0.0),
        )

    def pick(self, which: NDArray[np.bool_]) -> Samples:
        return Samples(self.features[which], self.tokens[which], self.damage[which])


def fit_heads(measured: Measurements, seed: int = 0) -> HeadFit:
    """Heads from all sequences, judged on held-out ones. Fewer than two sequences hold nothing out:
    their confidence is 0, which makes eta 1."""
    samples = Samples.of(measured)
    whole = Regression.fit(samples)
    targets = whole.targets(samples)
    r2 = _held_out_r2(samples, seed)
    bounds = np.quantile(targets, [CLIP_SHARE, 1 - CLIP_SHARE], axis=(0, 1, 2))
    heads = ResidualHeads(
        center=whole.center,
        weight=whole.weight.astype(np.float32),
        bias=whole.bias.astype(np.float32),
        confidence=np.clip(r2, 0.0, 1.0).astype(np.float32),
        clip=np.moveaxis(bounds, 0, -1).astype(np.float32),
    )
    return HeadFit(heads, r2, targets.std((0, 1, 2)))


def _held_out_r2(samples: Samples, seed: int) -> FloatArray:
    """Explained share of the targets' variance, [2, T], over folds of sequences."""
    count = len(samples.tokens)
    if count < 2:
        return np.zeros(samples.damage.shape[3:])
    fold_of = np.random.default_rng(seed).permutation(count) % min(FOLDS, count)
    targets, errors = [], []
    for fold in range(int(fold_of.max()) + 1):
        others, held_out = samples.pick(fold_of != fold), samples.pick(fold_of == fold)
        model = Regression.fit(others)
        target = model.targets(held_out)
        targets.append(target)
        errors.append(target - model.predict(held_out))
    variance = np.concatenate(targets).var((0, 1, 2))
    error = (np.concatenate(errors) ** 2).mean((0, 1, 2))
    return 1.0 - error / np.where(variance > 0, variance, np.inf)


@dataclass(frozen=True, eq=False)
class Regression:
    """center: float32 [L, E, 2, 3]; rate: float64 [L, E, 2, T], damage of a token on average;
    weight: float64 [2, T, 3]; bias: float64 [2, T]."""

    center: Phi
    rate: FloatArray
    weight: FloatArray
    bias: FloatArray

    @staticmethod
    def fit(samples: Samples) -> Regression:
        center = _center(samples)
        rate = samples.damage.sum(0) / samples.tokens.sum()
        steps = rate.shape[-1]
        empty = Regression(
            center, rate, np.zeros((len(KINDS), steps, FEATURES)), np.zeros((len(KINDS), steps))
        )
        phi, targets = empty.features(samples), empty.targets(samples)
        for kind in range(len(KINDS)):
            x = phi[:, :, :, kind].reshape(-1, FEATURES)
            y = targets[:, :, :, kind].reshape(-1, steps)
            middle = x.mean(0)
            covariance = np.cov(x.T, bias=True)
            ridge = RIDGE * np.trace(covariance) / FEATURES + float(TINY)
            slope = np.linalg.solve(
                covariance + ridge * np.eye(FEATURES), (x - middle).T @ (y - y.mean(0)) / len(x)
            )
            empty.weight[kind] = slope.T
            empty.bias[kind] = y.mean(0) - middle @ slope
        return empty

    def features(self, samples: Samples) -> FloatArray:
        """phi of eq. 5, centred, float64 [n, L, E, 2, 3]."""
        return _phi(samples, self.center).astype(np.float64)

    def targets(self, samples: Samples) -> FloatArray:
        """Log residuals [n, L, E, 2, T]; 0 for a block that never cost anything."""
        tokens = samples.tokens[:, None, None, None, None]
        usual = (tokens + PRIOR_TOKENS) * self.rate
        found = samples.damage + PRIOR_TOKENS * self.rate
        known = self.rate > 0
        return np.log(np.where(known, found, 1.0) / np.where(known, usual, 1.0))

    def predict(self, samples: Samples) -> FloatArray:
        """rho of eq. 5 [n, L, E, 2, T]."""
        phi = self.features(samples)
        return np.einsum("nlekf,ktf->nlekt", phi, self.weight) + self.bias


def _phi(samples: Samples, center: Phi) -> Phi:
    return np.stack(
        [
            log_features(features, float(tokens), center, PRIOR_TOKENS)
            for features, tokens in zip(samples.features, samples.tokens, strict=True)
        ]
    )


def _center(samples: Samples) -> Phi:
    """Mean of the log features, [L, E, 2, 3], each with the average of all tokens mixed in."""
    rate = samples.features[..., :2].sum(0) / samples.tokens.sum()
    start = np.concatenate([rate, samples.features[..., 2:].max(0)], axis=-1)
    center = np.log(np.maximum(start, TINY)).astype(np.float32)
    return center + _phi(samples, center).mean(0, dtype=np.float32)
