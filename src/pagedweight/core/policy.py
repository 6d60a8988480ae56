"""Policy: everything the planner may be told, frozen, with its defaults written once.

The paper decides buckets, multipliers, depth caps, floors and the residual's weight by a search on
calibration data (section 4); the search writes this file and the server reads it. Buckets are on
routing mass relative to calibration, because sensitivity already contains the mass itself.
`core.policy_file` reads and writes it as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pagedweight.core.geometry import MAX_BITS, MIN_BITS
from pagedweight.errors import UserError


@dataclass(frozen=True)
class Bucket:
    """Experts whose mass is at least `at_least` times their calibration mass (and not the next).

    multiplier: mu of eq. 8, acts on the damage of both linear blocks of the expert.
    """

    at_least: float
    multiplier: float


@dataclass(frozen=True)
class FloorStage:
    """One pass of Algorithm 1's loop: how low rows may go.

    floors:     lowest bits by bucket, coldest first.
    least_bits: all rows together keep the bytes that they would have at so many bits each; single
                rows may lie below. None: floors alone count.
    depth_cap:  most levels that a row may lie below its resting bits, None for no cap; relaxed one
                level at a time, only when the capped rows cannot provide the bytes.
    emergency:  only tried instead of a preemption, and only when the policy allows it.
    """

    name: str
    floors: tuple[int, ...]
    depth_cap: int | None = None
    emergency: bool = False
    least_bits: int | None = None


WIDTH = 0.5
"""Octaves of a bucket."""
REACH = 4
"""Octaves from a ratio of 1 to the hottest bucket, and to the coldest."""


def ratio_buckets(calm: float, exponent: float = 1.0) -> tuple[Bucket, ...]:
    """Multipliers that are mass ratios to the power `exponent`, in steps of WIDTH, and 1 within
    `calm` octaves of the usual mass."""
    count = round((REACH - calm) / WIDTH)
    hotter = [2.0 ** (calm + WIDTH * step) for step in range(count)]
    edges = [0.0, *(1 / edge for edge in reversed(hotter)), *hotter]
    middles = [2.0 ** (calm + WIDTH * (step + 0.5)) for step in range(count)]
    ratios = [*(1 / middle for middle in reversed(middles)), 1.0, *middles]
    return tuple(
        Bucket(at_least=edge, multiplier=ratio**exponent)
        for edge, ratio in zip(edges, ratios, strict=True)
    )


def free_stages(buckets: int, least_bits: int | None = 3) -> tuple[FloorStage, ...]:
    """Every row may go to 2 bits while all together keep the bytes of `least_bits` bits; in an
    emergency, all may."""
    lowest = (MIN_BITS,) * buckets
    return (
        FloorStage("floor", lowest, least_bits=least_bits),
        FloorStage("emergency", lowest, emergency=True),
    )


DEFAULT_BUCKETS = ratio_buckets(calm=0.75)
DEFAULT_STAGES = free_stages(len(DEFAULT_BUCKETS))
"""What the search settles on (docs/policy.md), and 2 bits for all only in an emergency."""


@dataclass(frozen=True)
class Policy:
    """What the planner does with what it sees. Blocks are KV blocks, steps are scheduler steps.

    buckets:                 coldest first; the first starts at 0.
    stages:                  most protective first.
    alpha:                   strength of the prompt residual (eq. 6).
    epsilon:                 damage floor of eq. 8, as a share of the mean damage of a step.
    prior_tokens:            tokens' worth of calibration mixed into online signals, so that a short
                             prompt is not taken at its word; 0 reads eq. 1 and 5 literally.
    offload_blocks:          T_blk of eq. 7: at this many free blocks or fewer, bits give way.
    reload_blocks:           bits come back while more than this many stay free.
    dwell_steps:             steps without pressure before bits come back.
    offload_pages_per_step:  most pages (planes) that one plan lowers.
    reload_pages_per_step:   most pages that one plan brings back.
    exchange_ratio:          at a constant load, bits change places when damage recovered per byte
                             is at least this many times the damage done; 0: never.
    allow_emergency:         whether emergency stages exist at all.
    use_routing, use_residual, use_movement, use_sensitivity: the paper's Table 4, each False takes
                             that part away: mu = 1 and one bucket; eta = 1; no plan ever; damage
                             the same for every row.
    """

    buckets: tuple[Bucket, ...] = DEFAULT_BUCKETS
    stages: tuple[FloorStage, ...] = DEFAULT_STAGES
    alpha: float = 1.0
    epsilon: float = 1e-6
    prior_tokens: float = 256.0
    offload_blocks: int = 16
    reload_blocks: int = 64
    dwell_steps: int = 32
    offload_pages_per_step: int = 4096
    reload_pages_per_step: int = 64
    exchange_ratio: float = 2.0
    allow_emergency: bool = True
    use_routing: bool = True
    use_residual: bool = True
    use_movement: bool = True
    use_sensitivity: bool = True

    def __post_init__(self) -> None:
        faults = [*_bucket_faults(self), *_stage_faults(self), *_number_faults(self)]
        if faults:
            raise UserError("policy: " + "; ".join(faults))


def _bucket_faults(policy: Policy) -> Iterator[str]:
    edges = [bucket.at_least for bucket in policy.buckets]
    multipliers = [bucket.multiplier for bucket in policy.buckets]
    if not edges or edges[0] != 0.0:
        yield f"the first bucket must start at a mass ratio of 0, buckets start at {edges}"
    if any(later <= edge for edge, later in pairwise(edges)):
        yield f"buckets must start at rising mass ratios, not {edges}"
    if any(later < mu for mu, later in pairwise(multipliers)):
        yield f"hotter buckets need multipliers at least as large, not {multipliers}"
    if any(not 0.0 < mu < float("inf") for mu in multipliers):
        yield f"multipliers must be positive numbers, not {multipliers}"


def _stage_faults(policy: Policy) -> Iterator[str]:
    if all(stage.emergency for stage in policy.stages):
        yield "there is no stage that is not an emergency"
    names = [stage.name for stage in policy.stages]
    if len(set(names)) != len(names):
        yield f"stage names must differ: {names}"
    emergencies = [stage.emergency for stage in policy.stages]
    if emergencies != sorted(emergencies):
        yield f"emergency stages must come last: {names}"
    for stage in policy.stages:
        floors = stage.floors
        if len(floors) != len(policy.buckets):
            yield f"stage {stage.name} has {len(floors)} floors for {len(policy.buckets)} buckets"
        if any(not MIN_BITS <= floor <= MAX_BITS for floor in floors):
            yield f"floors of stage {stage.name} must be {MIN_BITS} to {MAX_BITS} bits: {floors}"
        if list(floors) != sorted(floors):
            yield f"hotter buckets need floors at least as high in stage {stage.name}: {floors}"
        if stage.least_bits is not None and not MIN_BITS <= stage.least_bits <= MAX_BITS:
            yield (
                f"least_bits of stage {stage.name} must be {MIN_BITS} to {MAX_BITS} bits, or none, "
                f"not {stage.least_bits}"
            )
        if stage.depth_cap is not None and stage.depth_cap < 1:
            yield f"depth cap of stage {stage.name} is {stage.depth_cap}; 1 or more, or none"


def _number_faults(policy: Policy) -> Iterator[str]:
    for name in ("alpha", "epsilon", "prior_tokens"):
        value = getattr(policy, name)
        if not 0.0 <= value < float("inf"):
            yield f"{name} must be a number of at least 0, not {value}"
    if not (policy.exchange_ratio == 0 or 1.0 < policy.exchange_ratio < float("inf")):
        yield (
            f"exchange_ratio must be above 1, or 0 for no exchange, not {policy.exchange_ratio}: "
            f"else bits would change places for ever"
        )
    for name in ("offload_blocks", "dwell_steps"):
        if getattr(policy, name) < 0:
            yield f"{name} must be at least 0, not {getattr(policy, name)}"
    for name in ("offload_pages_per_step", "reload_pages_per_step"):
        if getattr(policy, name) < 1:
            yield f"{name} must be at least 1, not {getattr(policy, name)}"
    if policy.reload_blocks <= policy.offload_blocks:
        yield (
            f"reload_blocks {policy.reload_blocks} must be above offload_blocks "
            f"{policy.offload_blocks}, else bits would go up and down on a constant load"
        )
