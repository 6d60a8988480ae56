"""One MoE layer: its experts' weights and moments to packed planes, tables and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedweight.calibrate.moments import LayerMoments
from pagedweight.checkpoint.layerbuffer import LayerBuffer
from pagedweight.core.geometry import KINDS
from pagedweight.quantize.rows import quantize_rows

ReadExpert = Callable[[int, str], torch.Tensor]
"""(expert, kind) to its [N, K] weights in the source's type."""


def quantize_layer(
    read: ReadExpert,
    moments: LayerMoments,
    buffer: LayerBuffer,
    table_dtype: str,
    device: torch.device,
    done: Callable[[], None],
) -> dict[str, npt.NDArray[Any]]:
    """Fill `buffer`; returns the layer's calibration arrays by name (docs/format.md, without L).

    One linear block is in memory at a time. `done` is called after each.
    """
    backend = "torch" if device.type == "cuda" else "numba"
    error = np.zeros((buffer.shape.experts, len(KINDS), len(buffer.bits)), np.float32)
    for expert in range(buffer.shape.experts):
        for position, kind in enumerate(KINDS):
            weights = read(expert, kind).to(device, torch.float32)
            importance = torch.from_numpy(moments.second_moment[kind][expert])
            rows = quantize_rows(weights, importance, buffer.bits, table_dtype, backend)
            buffer.put(expert, kind, rows.codes, rows.tables)
            error[expert, position] = rows.error
            done()
    return {
        "tokens": moments.tokens,
        "mass": moments.mass,
        **{f"second_moment.{kind}": moments.second_moment[kind] for kind in KINDS},
        "error": error,
    }
