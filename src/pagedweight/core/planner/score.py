"""ScoreActions: the predicted damage of every legal step (eqs. 4, 6 and 8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedweight.core.geometry import KINDS
from pagedweight.core.observation import BatchSignals
from pagedweight.core.planner.context import Levels, PlanContext
from pagedweight.core.planner.order import Order
from pagedweight.core.planner.stages import Stage
from pagedweight.core.residual import Float32, prompt_factor
from pagedweight.core.size_table import IntArray


@dataclass(frozen=True, eq=False)
class Damage:
    """Eq. 8 for all rows and steps under one batch's signals; kept while they do not change.

    predicted: float32 [T, rows], in the context's damage unit.
    per_byte:  float32 [T, rows], predicted / Delta.
    bucket:    int8 [rows], routing bucket of the row's expert.
    order:     of downward steps, when it does not depend on where rows are: every row's steps cost
               more per byte the lower they lead. None otherwise.
    """

    signals: BatchSignals | None
    predicted: Float32
    per_byte: Float32
    bucket: Levels
    order: Order | None


def predict_damage(context: PlanContext, signals: BatchSignals | None) -> Damage:
    """Eq. 8: max{epsilon, mu * g * eta}. No signals: mu = eta = 1."""
    policy = context.policy
    multiplier, bucket = routing_buckets(context, signals)
    predicted = context.global_damage * multiplier
    if policy.use_residual and signals is not None and signals.rho is not None:
        assert signals.confidence is not None
        assert signals.clip is not None
        predicted *= prompt_factor(signals.rho, signals.confidence, signals.clip, policy.alpha)
    np.maximum(predicted, np.float32(policy.epsilon), out=predicted)
    per_byte = predicted * context.inverse_delta
    convex = context.steps > 0 and bool((per_byte[:-1] >= per_byte[1:]).all())
    order = Order.of_keys(per_byte.view(np.int32)) if convex else None
    return Damage(signals, predicted, per_byte, bucket, order)


def routing_buckets(context: PlanContext, signals: BatchSignals | None) -> tuple[Float32, Levels]:
    """mu (float32 [rows]) and bucket (int8 [rows]) from mass relative to calibration.

    Without routing statistics every expert has mu = 1 and the bucket of a ratio of 1.
    """
    buckets, rows = context.policy.buckets, context.index.rows
    if signals is None or not context.policy.use_routing:
        usual = sum(bucket.at_least <= 1.0 for bucket in buckets[1:])
        return np.ones(rows, np.float32), np.full(rows, usual, np.int8)
    ratio = signals.mass / context.usual_mass
    of_expert = np.zeros(ratio.shape, np.int8)
    for bucket in buckets[1:]:
        of_expert += ratio >= bucket.at_least
    multipliers = np.array([bucket.multiplier for bucket in buckets], np.float32)
    both = np.repeat(of_expert.ravel(), len(KINDS))
    return multipliers.take(both), both


def offload_order(damage: Damage, now: Levels) -> Order:
    """Order of downward steps.

    A step is available only after the one above it, so it sorts no earlier than that: the running
    maximum from d_i down. The bit pattern of a positive float orders like the float.
    """
    if damage.order is not None:
        return damage.order
    ordered = np.empty_like(damage.per_byte)
    above = np.zeros(ordered.shape[1], np.float32)
    for step in range(len(ordered) - 1, -1, -1):
        own = damage.per_byte[step] * (step < now)
        above = np.maximum(own, above)
        ordered[step] = above
    return Order.of_keys(ordered.view(np.int32))


def restore_order(damage: Damage, now: Levels) -> Order:
    """Order of upward steps, most damage recovered per byte first: the mirror image."""
    if damage.order is not None:
        return Order.of_keys(-damage.order.keys)
    ordered = np.empty_like(damage.per_byte)
    below = np.full(ordered.shape[1], np.inf, np.float32)
    for step in range(len(ordered)):
        own = np.where(step >= now, damage.per_byte[step], np.float32(np.inf))
        below = np.minimum(own, below)
        ordered[step] = below
    return Order.of_keys(-ordered.view(np.int32))


@dataclass(frozen=True, eq=False)
class Rows:
    """Where rows are at one planner step and what it costs to lower them.

    now: int8 [rows], level index of d_i; slots: int64 [classes] and held: bytes, settled there.
    """

    damage: Damage
    now: Levels
    slots: IntArray
    held: int

    @staticmethod
    def of(context: PlanContext, damage: Damage, now: Levels) -> Rows:
        slots = context.slots(now)
        return Rows(damage, now, slots, int(context.pages.held(slots)))


@dataclass(frozen=True, eq=False)
class ScoredActions:
    """R_s: the legal steps of one stage. Step (t, row) is legal when floor <= t < now.

    order: of all steps down from `now`; floor: int8 [rows], level index, never above `now`.
    """

    rows: Rows
    order: Order
    stage: Stage
    floor: Levels


def score_actions(rows: Rows, order: Order, stage: Stage) -> ScoredActions:
    """R_s of one stage: its floor by the row's routing bucket, never above where the row is."""
    floor = np.minimum(stage.floors.take(rows.damage.bucket), rows.now)
    return ScoredActions(rows, order, stage, floor)
