"""Prompt residual: features, the linear heads of eq. 5 and the correction eta of eq. 6.

Read literally (normalized norms), the paper's three features predict nothing, because gate_up's
input is normalized. Here they carry the mass and are logs, centred per block over calibration
sequences. Both calibration and planner go through `log_features`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.geometry import KINDS
from pagedweight.errors import CheckpointError, listing

Float32 = NDArray[np.float32]
FEATURES = 3
NAMES = ("center", "weight", "bias", "confidence", "clip")
PREFIX = "residual."
TINY = np.float32(1e-30)


@dataclass(frozen=True, eq=False)
class ResidualHeads:
    """One linear head for each kind and step b -> next lower level; all float32.

    Steps are counted from below: t leads from level t + 1 to level t, T = levels - 1 of them.

    center:     [L, E, 2, 3], mean over calibration sequences of each block's log features.
    weight:     [2, T, 3], w of eq. 5; bias: [2, T], a of eq. 5.
    confidence: [2, T], c of eq. 6.
    clip:       [2, T, 2], rho_min and rho_max of eq. 6.
    """

    center: Float32
    weight: Float32
    bias: Float32
    confidence: Float32
    clip: Float32

    @staticmethod
    def from_arrays(
        arrays: Mapping[str, NDArray[Any]], layers: int, experts: int, levels: int
    ) -> ResidualHeads | None:
        """The `residual.*` tensors of a calibration file; None when it has none of them.

        Raises CheckpointError that lists every missing or ill-shaped one.
        """
        if not any(name.startswith(PREFIX) for name in arrays):
            return None
        steps = levels - 1
        shapes: dict[str, tuple[int, ...]] = {
            "center": (layers, experts, len(KINDS), FEATURES),
            "weight": (len(KINDS), steps, FEATURES),
            "bias": (len(KINDS), steps),
            "confidence": (len(KINDS), steps),
            "clip": (len(KINDS), steps, 2),
        }
        faults, parts = [], {}
        for name, shape in shapes.items():
            found = arrays.get(PREFIX + name)
            if found is None:
                faults.append(f"{PREFIX}{name} is missing")
            elif found.shape != shape:
                faults.append(f"{PREFIX}{name} is {list(found.shape)}, not {list(shape)}")
            elif not np.isfinite(found).all():
                faults.append(f"{PREFIX}{name} has values that are not finite")
            else:
                parts[name] = np.ascontiguousarray(found, np.float32)
        if not faults and (parts["clip"][..., 0] > parts["clip"][..., 1]).any():
            faults.append(f"{PREFIX}clip has a lower bound above its upper bound")
        if faults:
            raise CheckpointError(f"residual heads: {listing(faults)}")
        return ResidualHeads(**parts)

    def to_arrays(self) -> dict[str, Float32]:
        """The tensors as they are named in a calibration file."""
        return {PREFIX + name: getattr(self, name) for name in NAMES}


def log_features(
    features: Float32, tokens: float, center: Float32 | None = None, prior_tokens: float = 0.0
) -> Float32:
    """phi of eq. 5: logs of the three features, float32 [..., 3].

    features:     [..., 3], sum r|x|, sum r|x|^2 and max |x| of a block over the tokens seen.
    tokens:       all tokens of the prompt, not only those routed to the block: a block that few
                  tokens reach has small features, that is how they carry the mass.
    center:       [..., 3], subtracted when given.
    prior_tokens: tokens at the center's rate that are mixed in; needs `center`.

    A maximum of 0 (no token came) says nothing: its feature is the center's.
    """
    base = np.zeros(FEATURES, np.float32) if center is None else center
    seen: Float32 = features[..., :2].astype(np.float32)
    if center is not None and prior_tokens:
        seen += np.float32(prior_tokens) * np.exp(base[..., :2])
    out = np.empty(features.shape, np.float32)
    total = max(tokens + (prior_tokens if center is not None else 0.0), 1.0)
    out[..., :2] = np.log(np.maximum(seen / np.float32(total), TINY)) - base[..., :2]
    top = features[..., 2]
    out[..., 2] = np.where(top > 0, np.log(np.maximum(top, TINY)) - base[..., 2], 0.0)
    return out


def predict_residual(heads: ResidualHeads, phi: Float32) -> Float32:
    """Eq. 5 for every block and step: rho, float32 [T, rows]. phi: [L, E, 2, 3], centred."""
    layers, experts, kinds, _ = phi.shape
    steps = heads.bias.shape[1]
    out = np.empty((steps, layers * experts, kinds), np.float32)
    for kind in range(kinds):
        flat = phi[:, :, kind].reshape(-1, FEATURES)
        out[:, :, kind] = heads.weight[kind] @ flat.T + heads.bias[kind][:, None]
    return out.reshape(steps, -1)


def prompt_factor(rho: Float32, confidence: Float32, clip: Float32, alpha: float) -> Float32:
    """Eq. 6: eta, float32 [T, rows]. rho: [T, rows]; confidence: [2, T]; clip: [2, T, 2]."""
    experts = rho.shape[1] // len(KINDS)
    low, high = (np.tile(bound.T, experts) for bound in (clip[..., 0], clip[..., 1]))
    out: Float32 = np.minimum(np.maximum(rho, low), high)
    out *= np.tile((np.float32(alpha) * confidence).T, experts)
    np.exp(out, out=out)
    return out
