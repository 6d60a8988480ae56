"""Policies by name: bits within a budget of bytes, for serving (`pagedweight plan`) and evaluation.

`make_policy(name, context, budget_bytes, seed).assign(signals)` gives the bits for what comes next.
"""

from __future__ import annotations

from pagedweight.core.planner.context import PlanContext
from pagedweight.core.policies.assignment import Assignment, Bits, PrecisionPolicy
from pagedweight.core.policies.baselines import (
    FixedPolicy,
    dynamic_layer,
    random_mix,
    static,
    uniform,
)
from pagedweight.core.policies.paged import LOADS, Load, PagedPolicy
from pagedweight.errors import UserError

POLICIES = ("uniform", "random", "static", "dynamic-layer", "paged")

__all__ = [
    "LOADS",
    "POLICIES",
    "Assignment",
    "Bits",
    "FixedPolicy",
    "Load",
    "PagedPolicy",
    "PrecisionPolicy",
    "make_policy",
]


def make_policy(
    name: str, context: PlanContext, budget_bytes: int, seed: int = 0, load: Load = "requests"
) -> PrecisionPolicy:
    """The policy `name` at a budget of routed experts' bytes, tables included.

    seed: of the blocks that uniform and random draw. load: what paged is put under.
    Raises UserError for a name that is none of POLICIES and for a budget that is too small.
    """
    if name == "uniform":
        return uniform(context, budget_bytes, seed)
    if name == "random":
        return random_mix(context, budget_bytes, seed)
    if name == "static":
        return static(context, budget_bytes)
    if name == "dynamic-layer":
        return dynamic_layer(context, budget_bytes)
    if name == "paged":
        return PagedPolicy(context, budget_bytes, load)
    raise UserError(f"policy {name!r} is not one of {', '.join(POLICIES)}")
