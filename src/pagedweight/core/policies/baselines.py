"""Policies without a runtime: one assignment for good. What the paper compares with (section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.geometry import KINDS
from pagedweight.core.observation import BatchSignals
from pagedweight.core.planner.context import PlanContext
from pagedweight.core.planner.initial import floor_level, initial_plan
from pagedweight.core.policies.assignment import Assignment, assignment_of
from pagedweight.core.size_table import IntArray
from pagedweight.errors import UserError


@dataclass(frozen=True, eq=False)
class FixedPolicy:
    """The same assignment whatever is computed."""

    assignment: Assignment

    def assign(self, signals: BatchSignals | None) -> Assignment:
        """See `PrecisionPolicy`; signals make no difference."""
        return self.assignment


def uniform(context: PlanContext, budget_bytes: int, seed: int) -> FixedPolicy:
    """Any-Precision LLM: one level for all, the highest whose bytes fit.

    Bytes left over raise blocks drawn by `seed` one level each, so that a budget between two levels
    can be compared at equal bytes; at the bytes of a level nothing is drawn. Raises UserError when
    the lowest level does not fit.
    """
    level, spare = uniform_level(context, budget_bytes)
    levels = np.full(context.index.rows, level, np.int64)
    if level < context.steps:
        order = np.random.default_rng(seed).permutation(context.index.rows)
        _raise(context, levels, order, spare)
    return _fixed(context, levels)


def random_mix(context: PlanContext, budget_bytes: int, seed: int) -> FixedPolicy:
    """Blocks rise one level at a time in an order drawn by `seed` until the bytes are used.

    They start from the floor that `static` has at this budget: the same choices, chosen blindly.
    """
    level = floor_level(context, budget_bytes)
    levels = np.full(context.index.rows, level, np.int64)
    spare = budget_bytes - context.sizes.total(context.bits_of(levels.astype(np.int8)))
    rises = np.repeat(np.arange(context.index.rows), context.steps - level)
    order = np.random.default_rng(seed).permutation(rises)
    _raise(context, levels, order, spare)
    return _fixed(context, levels)


def static(context: PlanContext, budget_bytes: int) -> FixedPolicy:
    """MxMoE's kind of plan: a near-exact allocation by calibration's sensitivities, then frozen."""
    return FixedPolicy(assignment_of(context, initial_plan(context, budget_bytes).bits))


def dynamic_layer(context: PlanContext, budget_bytes: int) -> FixedPolicy:
    """DP-LLM's kind: every layer reads one of two neighbouring levels, token by token.

    A layer reads the higher level for the share of tokens whose estimated error at the lower one is
    largest; the share makes the bytes *read* meet the budget on average. Resident are the planes of
    the higher level (paper 5.1: it "needs to keep the higher-bit tensors in memory"), unless the
    budget is a level's bytes and there is nothing to choose.
    """
    level, spare = uniform_level(context, budget_bytes)
    bits = context.sizes.levels
    low = np.full(context.index.shape, bits[level], np.int8)
    if level == context.steps or not spare:
        return FixedPolicy(Assignment(low))
    high = np.full(context.index.shape, bits[level + 1], np.int8)
    share = min(1.0, spare / float(context.delta[level].sum()))
    return FixedPolicy(Assignment(low, high, share))


def uniform_level(context: PlanContext, budget_bytes: int) -> tuple[int, int]:
    """The highest level index that all rows fit at, and the bytes left over. Raises UserError."""
    rows = context.index.rows // len(KINDS)
    totals = context.sizes.resident.sum(axis=0) * rows
    level = int(np.searchsorted(totals, budget_bytes, side="right")) - 1
    if level < 0:
        raise UserError(
            f"a budget of {budget_bytes} bytes does not hold the routed experts at "
            f"{context.sizes.lowest} bits, the lowest stored: that takes {int(totals[0])} bytes"
        )
    return level, int(budget_bytes - totals[level])


def _raise(context: PlanContext, levels: IntArray, order: IntArray, spare: int) -> None:
    """Raise rows of `levels` one level each in `order`, in place, skipping what does not fit."""
    for row in order.tolist():
        step = int(levels[row])
        if step < context.steps and context.delta[step, row] <= spare:
            spare -= int(context.delta[step, row])
            levels[row] += 1


def _fixed(context: PlanContext, levels: NDArray[np.int64]) -> FixedPolicy:
    return FixedPolicy(assignment_of(context, context.bits_of(levels.astype(np.int8))))
