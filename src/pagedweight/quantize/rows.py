"""Any-Precision codes of the rows of a weight matrix: the offline half of the paper's format.

Each output row has its own clusters. The seed level is the optimal weighted 1-D k-means of the row
with the importance h_c = E[x_c^2] of its input columns (paper, eq. 2); each further bit cuts every
cluster in two, where that cut is best. Codes are nested (`code_b = code_P >> (P - b)`) and ascend
with the value, so a level's code is a prefix of the bit-planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from pagedweight.core.geometry import MAX_BITS, MIN_BITS
from pagedweight.quantize.centroids import TORCH_DTYPE, level_tables

Backend = Literal["numba", "torch"]
DEFAULT_LEVELS = (2, 3, 4, 5, 6)
IMPORTANCE_FLOOR = 1e-6
"""Columns count at least this part of their row's mean importance when clusters are chosen, so that
a column that calibration never saw alive still lies in the cluster of its neighbours."""


@dataclass(frozen=True)
class RowCodes:
    """Codes and tables of N rows.

    codes:     uint8 [N, K], of max(levels) bits; a tensor on a GPU where that made them.
    tables:    {b: uint16 [N, 2^b]}, bit patterns of the table dtype, ascending in a row.
    row_error: float64 [N, levels], sum over c of h_c (W - W_b)_c^2 with rounded centroids.
    """

    codes: npt.NDArray[np.uint8] | torch.Tensor
    tables: dict[int, npt.NDArray[np.uint16]]
    row_error: npt.NDArray[np.float64]

    @property
    def error(self) -> npt.NDArray[np.float64]:
        """float64 [levels]: importance-weighted squared error of all rows."""
        return self.row_error.sum(axis=0)


def quantize_rows(
    weights: npt.NDArray[np.float32] | torch.Tensor,
    importance: npt.NDArray[np.floating] | torch.Tensor | None,
    levels: Sequence[int] = DEFAULT_LEVELS,
    table_dtype: str = "bfloat16",
    backend: Backend = "numba",
    measure: npt.NDArray[np.floating] | torch.Tensor | None = None,
) -> RowCodes:
    """Quantize the rows of `weights`, float32 [N, K], to nested codes at every one of `levels`.

    importance: [K] for all rows or [N, K]; not negative. None, or a row that is all zero, counts
    as 1 everywhere. `measure`: the h of `row_error` when that is another one. Levels ascend
    without a gap in 2..8; the first is the seed. `backend` "numba" runs on the CPU's cores,
    "torch" where `weights` live; both find the same optimum, and codes differ only where two cuts
    are equal to within rounding (1e-9 of the row's error).

    Raises ValueError for NaN or Inf, a magnitude beyond the table dtype, negative importance,
    shapes that do not fit, and bad levels.
    """
    levels = tuple(levels)
    _check_levels(levels)
    w = torch.as_tensor(weights)
    _check_weights(w, TORCH_DTYPE[table_dtype])
    h = _check_importance(w, importance)
    measured = h if measure is None else _check_importance(w, measure)
    run = _quantize_numba if backend == "numba" else _quantize_torch
    return run(w, measured, _fitting_importance(h), levels, TORCH_DTYPE[table_dtype])


def _check_levels(levels: tuple[int, ...]) -> None:
    if not levels or levels != tuple(range(levels[0], levels[-1] + 1)):
        raise ValueError(f"levels {levels} do not ascend without a gap")
    if levels[0] < MIN_BITS or levels[-1] > MAX_BITS:
        raise ValueError(f"levels {levels} are not within {MIN_BITS}..{MAX_BITS}")


def _check_weights(w: torch.Tensor, dtype: torch.dtype) -> None:
    if w.ndim != 2 or w.dtype != torch.float32 or 0 in w.shape:
        raise ValueError(f"weights must be float32 [N, K], not {w.dtype} {tuple(w.shape)}")
    largest = float(w.abs().max())  # NaN and Inf both fail the comparison
    if not largest <= torch.finfo(dtype).max:
        raise ValueError(f"a weight of {largest} has no finite {dtype} centroid")


def _check_importance(
    w: torch.Tensor, importance: npt.NDArray[np.floating] | torch.Tensor | None
) -> torch.Tensor:
    """Importance as float64 [1 or N, K] on the device of `w`; all-zero rows become ones."""
    if importance is None:
        return w.new_ones((1, w.shape[1]), dtype=torch.float64)
    h = torch.as_tensor(importance).to(w.device, torch.float64)
    h = h[None] if h.ndim == 1 else h
    if h.shape not in ((1, w.shape[1]), tuple(w.shape)):
        raise ValueError(f"importance {tuple(h.shape)} does not fit weights {tuple(w.shape)}")
    if not bool(torch.isfinite(h).all()) or bool((h < 0).any()):
        raise ValueError("importance must be finite and not negative")
    return torch.where((h == 0).all(dim=1, keepdim=True), 1.0, h)


def _fitting_importance(h: torch.Tensor) -> torch.Tensor:
    """`h` relative to its row's mean and not below the floor: positive and of one magnitude."""
    relative = h / h.amax(dim=1, keepdim=True)
    relative /= relative.mean(dim=1, keepdim=True)
    return relative.clamp_(min=IMPORTANCE_FLOOR)


def _quantize_numba(
    w: torch.Tensor, h: torch.Tensor, fit_h: torch.Tensor, levels: tuple[int, ...], dtype
) -> RowCodes:
    from pagedweight.quantize import numba_rows  # compiles on first use

    if w.device.type != "cpu":
        raise ValueError(f"the numba backend reads weights on the CPU, not on {w.device}")
    rows, top = w.shape[0], levels[-1]
    weights, importance = w.contiguous().numpy(), h.contiguous().numpy()
    codes, leaf_weight, leaf_moment = numba_rows.fit(
        weights, fit_h.contiguous().numpy(), levels[0], top
    )
    tables = level_tables(
        torch.from_numpy(leaf_weight), torch.from_numpy(leaf_moment), levels, dtype
    )
    row_error = np.empty((rows, len(levels)))
    for position, level in enumerate(levels):
        out = np.empty(rows)
        table = tables[level].float().numpy()
        numba_rows.row_errors(weights, importance, codes, top - level, table, out)
        row_error[:, position] = out
    return RowCodes(codes, raw_tables(tables), row_error)


def _quantize_torch(
    w: torch.Tensor, h: torch.Tensor, fit_h: torch.Tensor, levels: tuple[int, ...], dtype
) -> RowCodes:
    from pagedweight.quantize import torch_rows

    codes, leaf_weight, leaf_moment = torch_rows.fit(w, fit_h, levels[0], levels[-1])
    tables = level_tables(leaf_weight, leaf_moment, levels, dtype)
    errors = torch_rows.row_errors(w, h, codes, tables)
    found = codes if codes.is_cuda else codes.numpy()
    return RowCodes(found, raw_tables(tables), errors.cpu().numpy())


def raw_tables(tables: dict[int, torch.Tensor]) -> dict[int, npt.NDArray[np.uint16]]:
    return {b: t.cpu().view(torch.int16).numpy().view(np.uint16) for b, t in tables.items()}
