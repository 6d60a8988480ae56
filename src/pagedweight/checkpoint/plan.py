"""Plan files: how many bits each linear block of a checkpoint has, as JSON.

    {"format": "pagedweight-plan", "version": 1,
     "bits": {"gate_up": [[4, 3, ...E], ...one list for each MoE layer], "down": [...]}}

Layers are in the order of the manifest's `moe_layers`, experts by their number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pagedweight.checkpoint.result_file import write_result
from pagedweight.checkpoint.shards import read_json
from pagedweight.core.geometry import KINDS, LayerShape
from pagedweight.errors import UserError, listing

PLAN_FORMAT = "pagedweight-plan"
PLAN_VERSION = 1
Plan = npt.NDArray[np.int8]
"""Bits by [MoE layer, expert, kind]."""


class Planned(Protocol):
    """What a plan has to fit; `Checkpoint` does."""

    @property
    def shape(self) -> LayerShape: ...
    @property
    def bits(self) -> tuple[int, ...]: ...
    @property
    def moe_layers(self) -> tuple[int, ...]: ...


def uniform_plan(checkpoint: Planned, bits: int) -> Plan:
    """int8 [L, E, 2] of `bits` everywhere; raises UserError for a level that is not stored."""
    if bits not in checkpoint.bits:
        raise UserError(
            f"{bits} bits are not stored; the checkpoint has {checkpoint.bits[0]} to "
            f"{checkpoint.bits[-1]}"
        )
    return np.full((len(checkpoint.moe_layers), checkpoint.shape.experts, 2), bits, np.int8)


def load_plan(path: str | Path, checkpoint: Planned) -> Plan:
    """int8 [L, E, 2] from a plan file; raises UserError naming what does not fit."""
    where = Path(path)
    content = read_json(where)
    if content.get("format") != PLAN_FORMAT:
        raise UserError(f"{where} is not a plan: format is {content.get('format')!r}")
    if content.get("version") != PLAN_VERSION:
        raise UserError(
            f"{where} is a plan of version {content.get('version')}; this release reads "
            f"version {PLAN_VERSION}"
        )
    by_kind = content.get("bits")
    if not isinstance(by_kind, dict) or sorted(by_kind) != sorted(KINDS):
        raise UserError(f"{where}: `bits` must hold exactly {' and '.join(KINDS)}")
    plan = np.empty((len(checkpoint.moe_layers), checkpoint.shape.experts, 2), np.int8)
    for index, kind in enumerate(KINDS):
        plan[:, :, index] = _rows(f"{where}: {kind}", by_kind[kind], checkpoint)
    return plan


def _rows(where: str, rows: Any, checkpoint: Planned) -> npt.NDArray[np.int8]:
    layers, experts = len(checkpoint.moe_layers), checkpoint.shape.experts
    if not isinstance(rows, list) or len(rows) != layers:
        found = len(rows) if isinstance(rows, list) else type(rows).__name__
        raise UserError(f"{where} has {found} layers, the checkpoint has {layers} MoE layers")
    faults = []
    for pos, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != experts:
            found = len(row) if isinstance(row, list) else type(row).__name__
            raise UserError(f"{where} layer {pos} has {found} experts, the checkpoint {experts}")
        faults += [
            f"layer {pos} expert {expert}: {bits!r}"
            for expert, bits in enumerate(row)
            if isinstance(bits, bool) or not isinstance(bits, int) or bits not in checkpoint.bits
        ]
    if faults:
        raise UserError(
            f"{where}: bits outside the stored levels {list(checkpoint.bits)}: {listing(faults)}"
        )
    return np.array(rows, np.int8)


def save_plan(path: str | Path, plan: npt.NDArray[np.integer[Any]]) -> None:
    """Write a plan [L, E, 2], under a temporary name first. UserError when `path` cannot be."""
    if plan.ndim != 3 or plan.shape[2] != len(KINDS):
        raise ValueError(f"a plan is [L, E, 2], not {list(plan.shape)}")
    content = {
        "format": PLAN_FORMAT,
        "version": PLAN_VERSION,
        "bits": {kind: plan[:, :, index].tolist() for index, kind in enumerate(KINDS)},
    }
    write_result(Path(path), (json.dumps(content) + "\n").encode())
