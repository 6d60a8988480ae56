"""Predicted damage of fixed bits, which needs no run, and paged's mean damage beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pagedweight.bench.outcome import Outcome
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.planner import PlanContext
from pagedweight.core.planner.score import predict_damage
from pagedweight.core.policy import Policy
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.runtime.timeline import Timeline

REFERENCE = 5
"""Bits of the fixed precision that paged's mean damage is held against."""


def damage_of_levels(checkpoint: Path) -> dict[int, float]:
    """Predicted damage of every stored level for all blocks: what a timeline says of a server with
    these fixed bits, at any time."""
    from pagedweight.serving.elastic.record import damage_at
    from pagedweight.serving.plans import calibration_of

    found = Checkpoint.open(checkpoint)
    index = BlockIndex(len(found.moe_layers), found.shape.experts)
    sizes = SizeTable.of(found.shape, found.bits)
    context = PlanContext.of(index, sizes, calibration_of(found), Policy())
    rest = predict_damage(context, None)
    return {
        bits: float(f"{damage_at(context, rest, np.full(index.rows, bits, np.int32)):.6g}")
        for bits in found.bits
    }


def beside_reference(
    of: Outcome, timeline: Timeline | None, damage: Mapping[int, float]
) -> dict[str, float | None]:
    """Mean damage of a paged run over that of REFERENCE bits, and the seconds in which the whole
    load may come once, all others calm at the bits of the start, for that to be 1; None where there
    is none. damage: `damage_of_levels`."""
    reference = damage.get(REFERENCE)
    if timeline is None or not reference or of.mean_damage is None:
        return {}
    start = timeline.samples[0].damage
    rest = reference - start
    every = (of.mean_damage - start) * of.measured_s / rest if rest > 0 else None
    return {
        f"damage_over_static{REFERENCE}": round(of.mean_damage / reference, 3),
        f"static{REFERENCE}_if_once_in_s": None if every is None else round(every, 1),
    }
