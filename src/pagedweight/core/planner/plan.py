"""Plan: the page movement plan {(i, q_i -> d_i, Delta_i)} that a planner step returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.geometry import KINDS
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner.context import Levels, PlanContext
from pagedweight.core.planner.score import Rows
from pagedweight.core.size_table import IntArray

Kind = Literal["none", "offload", "reload"]
BitsArray = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows that change their desired bits.

    kind:           "none" when no row does.
    stage:          bitwidth-floor stage that it was made under; "restore" for a reload.
    rows:           int64 [n], ascending; from_bits, to_bits: int32 [n].
    delta:          int64 [n], M^from - M^to in bytes (eq. 3), negative for a reload.
    target_bytes:   D that it was made for; for a reload the bytes that it may take.
    returned_bytes: whole pages that come back, negative: that are taken.
    stage_bytes:    whole pages that the stage could return at most (0 for a reload).
    damage:         predicted (eq. 8), in the units of sensitivity; negative: recovered.
    """

    kind: Kind
    stage: str
    rows: IntArray
    from_bits: BitsArray
    to_bits: BitsArray
    delta: IntArray
    target_bytes: int
    returned_bytes: int
    stage_bytes: int
    damage: float

    @staticmethod
    def none(stage: str = "", target_bytes: int = 0) -> Plan:
        """The empty plan."""
        ints, bits = np.empty(0, np.int64), np.empty(0, np.int32)
        return Plan("none", stage, ints, bits, bits, ints, target_bytes, 0, 0, 0.0)

    @staticmethod
    def between(
        context: PlanContext, rows: Rows, after: Levels, slots: IntArray, stage: str, target: int
    ) -> Plan:
        """The plan that takes `rows` to level indices `after` (one direction only).

        slots: int64 [classes], slots in every arena when settled there.
        """
        moved = np.flatnonzero(rows.now != after)
        if not moved.size:
            return Plan.none(stage, target)
        resident = context.sizes.resident
        kinds = (moved % len(KINDS)) * resident.shape[1]
        old, new = rows.now[moved], after[moved]
        delta = resident.take(kinds + old) - resident.take(kinds + new)
        offload = bool(delta[0] > 0)
        low, high = (after, rows.now) if offload else (rows.now, after)
        crossed = context.between(low, high).astype(np.float32)
        harm = float(np.vdot(rows.damage.predicted, crossed)) * context.damage_unit
        returned = rows.held - int(context.pages.held(slots))
        return Plan(
            kind="offload" if offload else "reload",
            stage=stage,
            rows=moved,
            from_bits=context.bits_of(old),
            to_bits=context.bits_of(new),
            delta=delta,
            target_bytes=target,
            returned_bytes=returned,
            stage_bytes=max(returned, 0),
            damage=harm if offload else -harm,
        )

    @staticmethod
    def joined(plans: Sequence[Plan], rows: Sequence[IntArray]) -> Plan:
        """One plan of those of all holdings; `rows`: of each holding, numbered as in the model.

        Bytes and damage are sums. An offload if any lowers rows, although others may raise theirs
        (exchanges); its stage is the loosest, that of the plan with most damage.
        """
        moved = [plan for plan in plans if plan.kind != "none"]
        of_kind = [plan for plan in moved if plan.kind == "offload"] or moved or list(plans)
        first = max(of_kind, key=lambda plan: plan.damage)
        number = np.concatenate([own[plan.rows] for plan, own in zip(plans, rows, strict=True)])
        order = np.argsort(number)

        def together(parts: list[NDArray[Any]]) -> NDArray[Any]:
            out: NDArray[Any] = np.concatenate(parts)[order]
            return out

        return Plan(
            kind=first.kind,
            stage=first.stage,
            rows=number[order],
            from_bits=together([plan.from_bits for plan in plans]),
            to_bits=together([plan.to_bits for plan in plans]),
            delta=together([plan.delta for plan in plans]),
            target_bytes=sum(plan.target_bytes for plan in plans),
            returned_bytes=sum(plan.returned_bytes for plan in plans),
            stage_bytes=sum(min(plan.stage_bytes, plan.target_bytes) for plan in plans),
            damage=sum(plan.damage for plan in plans),
        )

    def without_rises(self) -> Plan:
        """The rows that are lowered; an empty plan when there are none."""
        falls = self.to_bits < self.from_bits
        if not falls.any():
            return Plan.none(self.stage, self.target_bytes)
        if falls.all():
            return self
        kept = (self.rows[falls], self.from_bits[falls], self.to_bits[falls], self.delta[falls])
        return replace(self, rows=kept[0], from_bits=kept[1], to_bits=kept[2], delta=kept[3])

    @property
    def satisfied(self) -> bool:
        """Whether the stage of an offload can give the bytes asked for.

        The plan itself gives less when the pages-per-step cap cut it; later steps plan the rest.
        """
        return self.stage_bytes >= self.target_bytes

    @property
    def pages(self) -> int:
        """Planes that move."""
        return int(np.abs(self.from_bits - self.to_bits).sum())

    def apply(self, table: WeightPageTable) -> None:
        """Write d_i of the plan's rows into `table`."""
        if len(self.rows):
            table.set_desired(self.rows, self.to_bits)
