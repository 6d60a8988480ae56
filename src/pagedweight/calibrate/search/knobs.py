"""What the search turns, and the policy that a position of the knobs means."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedweight.core.policy import FloorStage, Policy, free_stages, ratio_buckets


@dataclass(frozen=True)
class Knobs:
    """alpha, prior_tokens: as in `Policy`.
    exponent:  a bucket's multiplier is its mass ratio to this power; 0 switches mu off.
    calm:      octaves around a ratio of 1, to each side, in which the multiplier is 1: the usual
               variation of calibration's own text, for which eta alone answers.
    floor:     lowest bits of a stage that is no emergency; with 2, all rows together keep the bytes
               of 3 (`core.policy.free_stages`).
    hot_ratio: buckets from here on keep one bit more in the first stage; None: no bucket.
    depth_cap: of the first stage.

    The defaults are where the search starts, and where it stays without evidence. An exponent of 1
    is arithmetic: an expert that meets a quarter of its usual tokens does a quarter of its damage.
    """

    alpha: float = 1.0
    exponent: float = 1.0
    calm: float = 1.0
    prior_tokens: float = 256.0
    floor: int = 3
    hot_ratio: float | None = None
    depth_cap: int | None = None


RANGES: dict[str, tuple[float | int | None, ...]] = {
    "floor": (3, 2),
    "exponent": (0.0, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0),
    "alpha": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0),
    "calm": (0.25, 0.5, 0.75, 1.0),
    "prior_tokens": (64.0, 128.0, 256.0, 512.0, 1024.0),
    "hot_ratio": (None, 2.0, 4.0),
    "depth_cap": (None, 1, 2, 3),
}
"""Values that are tried, in the order in which knobs are turned."""


def policy_of(knobs: Knobs, base: Policy) -> Policy:
    """`base` with buckets, stages, alpha and prior_tokens as the knobs say."""
    buckets = ratio_buckets(knobs.calm, knobs.exponent)
    edges = [bucket.at_least for bucket in buckets]
    hot = float("inf") if knobs.hot_ratio is None else knobs.hot_ratio
    floors = tuple(knobs.floor + (edge >= hot) for edge in edges)
    usual = (knobs.floor,) * len(edges)
    stages = list(free_stages(len(edges)))
    if knobs.floor > 2:
        stages[0] = FloorStage("floor", usual)
    if floors != usual or knobs.depth_cap is not None:
        least = stages[0].least_bits
        stages.insert(0, FloorStage("protect", floors, knobs.depth_cap, least_bits=least))
    return replace(
        base,
        buckets=buckets,
        stages=tuple(stages),
        alpha=knobs.alpha,
        prior_tokens=knobs.prior_tokens,
    )
