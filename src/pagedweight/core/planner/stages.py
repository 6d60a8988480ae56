"""BitwidthFloorStages: how low each row may go, stage by stage (Algorithm 1 line 5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.policy import Policy
from pagedweight.core.size_table import SizeTable


@dataclass(frozen=True, eq=False)
class Stage:
    """A policy's `FloorStage` over the levels that the checkpoint has.

    floors: int8 [buckets], lowest level index by bucket. least: level index whose bytes all rows
    together keep, 0 where floors alone count.
    """

    name: str
    floors: NDArray[np.int8]
    depth_cap: int | None
    emergency: bool
    least: int = 0


def bitwidth_floor_stages(policy: Policy, sizes: SizeTable) -> tuple[Stage, ...]:
    """The stages, most protective first; bits the checkpoint lacks move to its nearest level.

    Emergency stages are left out when the policy forbids them or they allow nothing that the
    stage before does not.
    """
    low, high = sizes.lowest, sizes.planes
    stages: list[Stage] = []
    for stage in policy.stages:
        floors = (np.clip(stage.floors, low, high) - low).astype(np.int8)
        least = 0 if stage.least_bits is None else min(max(stage.least_bits, low), high) - low
        if stage.emergency:
            lower = bool(stages) and (
                bool((floors < stages[-1].floors).any()) or least < stages[-1].least
            )
            if not (policy.allow_emergency and lower):
                continue
        stages.append(Stage(stage.name, floors, stage.depth_cap, stage.emergency, least))
    return tuple(stages)
