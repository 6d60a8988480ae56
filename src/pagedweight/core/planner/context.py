"""What the planner is given once: Omega_off, the policy and the sizes, laid out for arithmetic.

Per-step arrays are [T, rows] with T = levels - 1: step t leads a row from level index t + 1 to t,
so one level of all rows is contiguous. "Level" in this package is an index into `levels`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.calibration import Calibration
from pagedweight.core.geometry import KINDS
from pagedweight.core.holdings import Holding
from pagedweight.core.page_table import BitsArray, WeightPageTable
from pagedweight.core.planner.stages import Stage, bitwidth_floor_stages
from pagedweight.core.policy import Policy
from pagedweight.core.residual import Float32
from pagedweight.core.size_class import SizeClassPages, SlotCounts
from pagedweight.core.size_table import BlockIndex, FloatArray, IntArray, SizeTable

Levels = NDArray[np.int8]
UNIFORM_RATIO = 4.0
"""Damage ratio of one bit less where sensitivity is switched off; measured: 3.5 to 4.7."""


@dataclass(frozen=True, eq=False)
class PlanContext:
    """Inputs that do not change while serving.

    resting_bits:  int32 [rows], bits that depth caps are counted from.
    global_damage: float32 [T, rows], g of eq. 4 in units of `damage_unit` (the mean step).
    delta:         float64 [T, rows], bytes released by each step (eq. 3).
    step_slots:    int64 [T * kinds, classes], change of slots by a downward step of a kind.
    pages:         arenas and their page size: targets are met in whole pages.
    stages:        the bitwidth-floor stages, most protective first.
    usual_mass:    float64 [L, E], calibration's routing mass, a layer sums to 1.
    """

    index: BlockIndex
    sizes: SizeTable
    calibration: Calibration
    policy: Policy
    pages: SizeClassPages
    resting_bits: BitsArray
    global_damage: Float32
    damage_unit: float
    delta: FloatArray
    inverse_delta: Float32
    step_slots: IntArray
    stages: tuple[Stage, ...]
    usual_mass: FloatArray

    @staticmethod
    def of(
        index: BlockIndex,
        sizes: SizeTable,
        calibration: Calibration,
        policy: Policy,
        page_bytes: int = 1,
        resting_bits: BitsArray | None = None,
    ) -> PlanContext:
        """Lay out the inputs. `resting_bits` None: the top level. Raises ValueError on a misfit."""
        shape = (*index.shape, len(sizes.levels))
        if calibration.levels != sizes.levels or calibration.sensitivity.shape != shape:
            raise ValueError(
                f"calibration of {calibration.sensitivity.shape} at {calibration.levels} bits "
                f"for blocks {shape} at {sizes.levels}"
            )
        steps = sizes.resident[:, 1:] - sizes.resident[:, :-1]
        if (steps <= 0).any():
            raise ValueError(f"a lower level must be smaller: {sizes.resident.tolist()}")
        delta = np.tile(steps.T, index.layers * index.experts).astype(np.float64)
        damage, unit = _global_damage(calibration, policy, delta)
        resting = np.full(index.rows, sizes.planes, np.int32)
        pages = SizeClassPages.of(sizes, page_bytes)
        return PlanContext(
            index=index,
            sizes=sizes,
            calibration=calibration,
            policy=policy,
            pages=pages,
            resting_bits=resting if resting_bits is None else resting_bits.astype(np.int32),
            global_damage=damage,
            damage_unit=unit,
            delta=delta,
            inverse_delta=(1.0 / delta).astype(np.float32),
            step_slots=pages.all_step_slots(),
            stages=bitwidth_floor_stages(policy, sizes),
            usual_mass=calibration.mass / calibration.mass.sum(axis=1, keepdims=True),
        )

    def of_holding(self, holding: Holding) -> PlanContext:
        """The rows of a holding by themselves: the same damage, in the same unit. Routing mass
        stays relative to whole layers; the residual comes with the signals, so heads stay behind.
        """
        rows, grid = holding.rows(self.index), np.ix_(holding.layers, holding.experts)
        whole = self.calibration
        calibration = Calibration(
            whole.levels, whole.sensitivity[grid], whole.mass[grid], None, whole.measured, ()
        )
        return replace(
            self,
            index=holding.index,
            calibration=calibration,
            resting_bits=self.resting_bits[rows],
            global_damage=np.ascontiguousarray(self.global_damage[:, rows]),
            delta=np.ascontiguousarray(self.delta[:, rows]),
            inverse_delta=np.ascontiguousarray(self.inverse_delta[:, rows]),
            usual_mass=self.usual_mass[grid],
        )

    @property
    def steps(self) -> int:
        """T: steps between neighbouring levels."""
        return len(self.sizes.levels) - 1

    @cached_property
    def level_bytes(self) -> tuple[int, ...]:
        """What all rows hold at each level index, in whole pages."""
        levels = range(len(self.sizes.levels))
        every = (np.full(self.index.rows, level, np.int8) for level in levels)
        return tuple(int(self.pages.held(self.slots(each))) for each in every)

    def levels_of(self, bits: BitsArray) -> Levels:
        """Level index of each row, int8 [rows]."""
        return (bits - self.sizes.lowest).astype(np.int8)

    def bits_of(self, levels: Levels) -> BitsArray:
        """Bits of each level index, int32 [rows]."""
        return levels.astype(np.int32) + self.sizes.lowest

    def slots(self, levels: Levels) -> IntArray:
        """Slots in every arena when rows are settled at `levels`, int64 [classes].

        An expert's two level indices are read as one 16-bit number, so that one count of half the
        length gives both kinds.
        """
        kinds, count = len(KINDS), len(self.sizes.levels)
        pairs = np.bincount(levels.view("<u2"), minlength=count << 8)[: count << 8]
        both = pairs.reshape(count, 256)[:, :count]
        out = np.empty(kinds * (1 + count), np.int64)
        out[kinds : kinds + count] = both.sum(0)
        out[kinds + count :] = both.sum(1)
        out[:kinds] = out[kinds:].reshape(kinds, count) @ np.array(self.sizes.levels)
        return out

    def between(self, low: Levels, high: Levels | None) -> NDArray[np.bool_]:
        """Steps (t, row) with low <= t < high, bool [T, rows]; high None: the top level."""
        step = np.arange(self.steps, dtype=np.int8)[:, None]
        out: NDArray[np.bool_] = step >= low
        if high is not None:
            out &= step < high
        return out


def _global_damage(
    calibration: Calibration, policy: Policy, delta: FloatArray
) -> tuple[Float32, float]:
    """Eq. 4 for neighbouring levels, float32 [T, rows] in units of its mean, and that mean."""
    if policy.use_sensitivity:
        s = calibration.sensitivity
        rows = s.shape[0] * s.shape[1] * len(KINDS)
        damage = np.maximum(s[..., :-1] - s[..., 1:], 0.0).reshape(rows, -1).T
    else:
        harm = UNIFORM_RATIO ** -np.arange(len(delta), dtype=np.float64)
        damage = delta * harm[:, None]
    unit = (float(damage.mean()) if damage.size else 0.0) or 1.0
    return np.ascontiguousarray(damage / unit, np.float32), unit


@dataclass(frozen=True, eq=False)
class TableState:
    """T_t: what the planner reads of the page table.

    desired_bits: int32 [rows], d_i, where rows are or are on their way to.
    slots:        slots that are taken on the device now, transitions included.
    """

    desired_bits: BitsArray
    slots: SlotCounts

    @staticmethod
    def of(table: WeightPageTable) -> TableState:
        return TableState(table.desired_bits.copy(), table.slots())
