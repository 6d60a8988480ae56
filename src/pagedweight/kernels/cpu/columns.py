"""Activations in and out: the planes' column order, and the 16-bit types.

Inside 16 columns, the bit at place 8n + 4c + s of a plane is column 8n + 2s + c; activations are
laid out by place, so that a decoded row and a token meet lane by lane.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pagedweight.kernels.cpu.machine import cached_here
from pagedweight.kernels.cpu.memory import (
    bf16_to_float,
    float_to_bf16,
    float_to_half,
    floats_at,
    half_to_float,
    shorts_at,
)

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""As `params.DTYPES`."""

with cached_here():

    @njit(cache=True, inline="always")
    def place(column):
        """Where a column of a group of 16 lies in the planes' order."""
        return (column & 8) + 4 * (column & 1) + ((column & 7) >> 1)

    @njit(cache=True)
    def widen_row(source, dtype, width, row):
        """One token's `width` values at address `source` into float32 `row`, zeros to its end."""
        if dtype == FLOAT32:
            values = floats_at(source, width)
            for column in range(width):
                row[column - (column & 15) + place(column & 15)] = values[column]
        else:
            shorts = shorts_at(source, width)
            for column in range(width):
                bits = shorts[column]
                value = bf16_to_float(bits) if dtype == BFLOAT16 else half_to_float(bits)
                row[column - (column & 15) + place(column & 15)] = value
        for column in range(width, row.size):
            row[column - (column & 15) + place(column & 15)] = np.float32(0)

    @njit(cache=True)
    def norm(row):
        """Euclidean norm of a padded float32 row; four partial sums, in a fixed order."""
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for column in range(0, row.size, 4):
            a += row[column] * row[column]
            b += row[column + 1] * row[column + 1]
            c += row[column + 2] * row[column + 2]
            d += row[column + 3] * row[column + 3]
        return np.sqrt((a + b) + (c + d))

    @njit(cache=True)
    def round_to(value, dtype):
        """float32 rounded to the type (ties to even), still as a float32."""
        if dtype == BFLOAT16:
            return bf16_to_float(float_to_bf16(value))
        if dtype == FLOAT16:
            return half_to_float(float_to_half(value))
        return value

    @njit(cache=True)
    def narrow(values, count, dtype, out):
        """`count` float32 values to the type, stored from address `out`."""
        if dtype == FLOAT32:
            floats = floats_at(out, count)
            for column in range(count):
                floats[column] = values[column]
        elif dtype == BFLOAT16:
            shorts = shorts_at(out, count)
            for column in range(count):
                shorts[column] = float_to_bf16(values[column])
        else:
            shorts = shorts_at(out, count)
            for column in range(count):
                shorts[column] = float_to_half(values[column])
