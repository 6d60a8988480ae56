"""act(gate) * up for 16 rows of one token, in float32 arithmetic that vectorizes.

Errors against exact functions are below 4e-7 relative to the larger of 1 and |act(gate)|
(`tests/kernels/test_cpu_parts.py` measures them), far below a rounding to 16 bits.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pagedweight.kernels.cpu.columns import place, round_to
from pagedweight.kernels.cpu.machine import LANES, cached_here
from pagedweight.kernels.cpu.memory import bits_of, float_of

SILU, GELU = 0, 1
"""As `params.ACTIVATIONS`; anything else is gelu_tanh."""

_ONE, _HALF = np.float32(1), np.float32(0.5)
_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUNDER = np.float32(1.5 * 2**23)
"""Added, it leaves the nearest integer in the low bits."""
_EXP = tuple(np.float32(c) for c in (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0))
_ERFC = tuple(
    np.float32(c)
    for c in (
        -0.00023533206587094557,
        0.0003836897198691073,
        0.0014919190750158995,
        -0.0032237929352477075,
        -0.010741901998290608,
        0.018218805413001693,
        0.13973477457674915,
        0.3435804144512419,
        0.5107913725099413,
    )
)
"""Least-squares fit of exp(z^2) erfc(z) / t in 2t - 1, t = 1 / (1 + z/2), 0 <= z <= 11."""
_ROOT_HALF = np.float32(0.7071067811865476)
_TANH_A, _TANH_B = np.float32(2 * 0.7978845608028654), np.float32(0.044715)
_LEAST, _MOST = np.float32(-87), np.float32(88)

with cached_here():

    @njit(cache=True)
    def exp(a):
        """e^a in float32, a held to -87..88; NaN stays NaN."""
        a = _MOST if a > _MOST else a
        a = _LEAST if a < _LEAST else a
        shifted = a * _LOG2E + _ROUNDER
        n = shifted - _ROUNDER
        r = (a - n * _LN2_HIGH) - n * _LN2_LOW
        poly = _EXP[0]
        for power in range(1, 8):
            poly = poly * r + _EXP[power]
        exponent = np.uint32((bits_of(shifted) << np.uint32(23)) + np.uint32(0x3F800000))
        return poly * float_of(exponent)

    @njit(cache=True)
    def sigmoid_times(g, u):
        """g / (1 + e^-u)."""
        return g / (_ONE + exp(-u))

    @njit(cache=True)
    def gelu(g):
        """g * Phi(g), exact form."""
        z = abs(g) * _ROOT_HALF
        t = _ONE / (_ONE + _HALF * z)
        u = t + t - _ONE
        poly = _ERFC[0]
        for power in range(1, 9):
            poly = poly * u + _ERFC[power]
        tail = _HALF * t * poly * exp(-(z * z))
        return g * (tail if g < 0 else _ONE - tail)

    @njit(cache=True)
    def activate(g, activation):
        """One value of the gate."""
        if activation == SILU:
            return sigmoid_times(g, g)
        if activation == GELU:
            return gelu(g)
        return sigmoid_times(g, _TANH_A * (g + _TANH_B * g * g * g))

    @njit(cache=True)
    def gate_sixteen(gates, ups, first, rows, activation, dtype, out):
        """16 rows of one token from `gates` and `ups` at `first`, into `out`[0:16] by place.

        Rounded to x's dtype; rows at and beyond `rows` are padding and become zero.
        """
        for row in range(LANES):
            value = round_to(activate(gates[first + row], activation) * ups[first + row], dtype)
            out[place(row)] = value if row < rows else np.float32(0)
