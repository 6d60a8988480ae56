"""Omega_off: what calibration measured, read by the schema of docs/format.md.

Arrays in, arrays out: whoever reads the safetensors file hands its tensors over as numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.geometry import KINDS
from pagedweight.core.residual import Float32, ResidualHeads
from pagedweight.errors import CheckpointError, listing

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Calibration:
    """L MoE layers, E experts, kinds (gate_up, down), levels as in the checkpoint's `bits`.

    levels:      the stored levels, ascending.
    sensitivity: float64 [L, E, 2, levels], s_i^b of eq. 2, finite and not negative.
    mass:        float64 [L, E], routing mass of eq. 1 on the calibration text, all positive: an
                 expert that was never routed has half a choice, so that ratios stay finite.
    heads:       prompt residual heads, None means eta = 1.
    measured:    whether sensitivity came with gradients; False: tokens * error stands in.
    unseen:      (layer, expert) never routed in calibration; their sensitivity is the smallest of
                 a routed expert of that layer, kind and level. In a layer that saw no token at
                 all (a checkpoint quantized without a text) every expert counts as one token.
    """

    levels: tuple[int, ...]
    sensitivity: FloatArray
    mass: FloatArray
    heads: ResidualHeads | None
    measured: bool
    unseen: tuple[tuple[int, int], ...]

    @staticmethod
    def from_arrays(arrays: Mapping[str, NDArray[Any]], levels: Sequence[int]) -> Calibration:
        """Build from the tensors of `calibration.safetensors`.

        Raises CheckpointError that lists every tensor which is missing, ill-shaped or not finite.
        """
        _check(arrays, len(levels))
        tokens = np.asarray(arrays["tokens"], np.float64)
        measured = "sensitivity" in arrays
        if measured:
            sensitivity = np.array(arrays["sensitivity"], np.float64)
        else:
            never = tokens.sum(axis=1, keepdims=True) == 0  # no text: all experts alike
            weight = np.where(never, 1.0, tokens)
            sensitivity = weight[:, :, None, None] * np.asarray(arrays["error"], np.float64)
        layers, experts = tokens.shape
        return Calibration(
            levels=tuple(levels),
            sensitivity=_with_unseen(sensitivity, tokens),
            mass=_positive_mass(np.asarray(arrays["mass"], np.float64), tokens),
            heads=ResidualHeads.from_arrays(arrays, layers, experts, len(levels)),
            measured=measured,
            unseen=tuple((int(at[0]), int(at[1])) for at in np.argwhere(tokens == 0)),
        )

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Arrays that `from_arrays` turns into an equal calibration (for traces)."""
        seen = np.ones(self.mass.shape, np.int64)
        for layer, expert in self.unseen:
            seen[layer, expert] = 0
        heads: dict[str, Float32] = {} if self.heads is None else self.heads.to_arrays()
        stated = {"sensitivity": self.sensitivity} if self.measured else {"error": self.sensitivity}
        return {"tokens": seen, "mass": self.mass, **stated, **heads}


def _check(arrays: Mapping[str, NDArray[Any]], levels: int) -> None:
    faults = [f"{name} is missing" for name in ("tokens", "mass") if name not in arrays]
    if "sensitivity" not in arrays and "error" not in arrays:
        faults.append("sensitivity and error are both missing")
    if not faults:
        tokens = arrays["tokens"]
        if tokens.ndim != 2:
            faults.append(f"tokens has {tokens.ndim} dimensions, not 2")
        of_blocks = (*tokens.shape, len(KINDS), levels)
        shapes = {"mass": tokens.shape, "sensitivity": of_blocks, "error": of_blocks}
        for name, shape in shapes.items():
            if name in arrays:
                faults += _array_faults(name, arrays[name], shape)
    if faults:
        raise CheckpointError(f"calibration: {listing(faults)}")


def _array_faults(name: str, array: NDArray[Any], shape: tuple[int, ...]) -> list[str]:
    if array.shape != shape:
        return [f"{name} is {list(array.shape)}, not {list(shape)}"]
    bad = np.argwhere(~np.isfinite(array) | (array < 0))
    if len(bad):
        return [f"{name} is negative or not finite at {bad[0].tolist()} ({len(bad)} places)"]
    return []


def _with_unseen(sensitivity: FloatArray, tokens: FloatArray) -> FloatArray:
    """Give experts without a token the smallest sensitivity of the layer's routed ones.

    Their own is 0 (no token was harmed), which would call them free; they matter at most as much
    as the least of the routed. A layer without any token keeps what it has.
    """
    seen = tokens > 0
    routed = np.where(seen[:, :, None, None], sensitivity, np.inf).min(axis=1, keepdims=True)
    stand_in = np.broadcast_to(routed, sensitivity.shape)
    use = ~seen[:, :, None, None] & np.isfinite(stand_in)
    return np.where(use, stand_in, sensitivity)


def _positive_mass(mass: FloatArray, tokens: FloatArray) -> FloatArray:
    """Mass with half a routed choice where there was none; even over a layer never reached."""
    experts = mass.shape[1]
    choices = tokens.sum(axis=1, keepdims=True)
    half = 0.5 / np.maximum(choices, 0.5 * experts)
    return np.where(mass > 0, mass, half)
