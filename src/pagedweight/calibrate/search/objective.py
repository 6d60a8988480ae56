"""How much damage a policy's plans do to texts that calibration has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pagedweight.calibrate.measurements import FloatArray
from pagedweight.calibrate.search.folds import Case, Trial
from pagedweight.core.calibration import Calibration
from pagedweight.core.observation import merge_signals
from pagedweight.core.planner import PlanContext
from pagedweight.core.policies import PagedPolicy, make_policy
from pagedweight.core.policies.assignment import Bits
from pagedweight.core.policy import FloorStage, Policy
from pagedweight.core.size_table import BlockIndex, SizeTable

BUDGET_BITS = (2.5, 3.0, 3.5, 4.0, 4.5)
"""Budgets, as the bytes of uniform bits; between two levels on a straight line."""
ALL = 10**9
"""Pages in a step: how fast a plan is carried out makes no difference to where it leads."""
TOLERANCE = 0.01
FINE = 10.0


@dataclass(frozen=True, eq=False)
class Yardstick:
    """Damage at every trial and budget, [trials, budgets], of two plans that no policy decides.

    static: the near-exact plan of the trial's calibration. oracle: that of each text's own damage,
    which no server can know.
    """

    static: FloatArray
    oracle: FloatArray


class Objective:
    """Trials with their yardsticks; `damage` runs a policy on all of them."""

    def __init__(
        self, trials: Sequence[Trial], sizes: SizeTable, index: BlockIndex, base: Policy
    ) -> None:
        self.trials, self.sizes, self.index = trials, sizes, index
        floors = (sizes.lowest,) * len(base.buckets)
        self._free = replace(base, stages=(FloorStage("lowest", floors),))
        totals = sizes.resident.sum(axis=0) * (index.rows // 2)
        inside = [b for b in BUDGET_BITS if sizes.lowest <= b <= sizes.planes]
        self.budget_bits = tuple(inside)
        self.budgets = [int(np.interp(bits, sizes.levels, totals)) for bits in inside]
        self.yardstick = Yardstick(
            static=self._of_plans(lambda trial, _: trial.calibration),
            oracle=self._of_plans(
                lambda trial, case: replace(trial.calibration, sensitivity=case.damage)
            ),
        )

    def damage(self, policy: Policy) -> FloatArray:
        """Measured damage of the plans that the runtime planner makes from each case's signals,
        summed over cases: [trials, budgets]."""
        out = np.zeros((len(self.trials), len(self.budgets)))
        brisk = replace(
            policy, dwell_steps=0, offload_pages_per_step=ALL, reload_pages_per_step=ALL
        )
        for row, trial in enumerate(self.trials):
            context, usual = self._context(trial.calibration, brisk), policy.prior_tokens
            seen = [merge_signals([case.signals], trial.calibration, usual) for case in trial.cases]
            for column, budget in enumerate(self.budgets):
                planner = PagedPolicy(context, budget)
                for case, signals in zip(trial.cases, seen, strict=True):
                    out[row, column] += self._harm(case, planner.assign(signals).bits)
        return out

    def score(self, damage: FloatArray) -> float:
        """Mean log of damage over static's in shifted trials, farther ones weighing more; lower is
        better. What in-domain trials lose beyond TOLERANCE is a fine: there, static is hard to
        beat, and the point is not to lose."""
        ratio = np.log(damage / self.yardstick.static).mean(axis=1)
        shifted = np.array([trial.shifted for trial in self.trials])
        lost = ratio[~shifted].mean() if (~shifted).any() else 0.0
        gained = lost
        if shifted.any():
            far = np.array([trial.distance for trial in self.trials])[shifted]
            gained = np.average(ratio[shifted], weights=far**2)
        return float(gained + FINE * max(0.0, lost - TOLERANCE))

    def _context(self, calibration: Calibration, policy: Policy) -> PlanContext:
        return PlanContext.of(self.index, self.sizes, calibration, policy)

    def _of_plans(self, known: Callable[[Trial, Case], Calibration]) -> FloatArray:
        """Damage of the plan that an exact allocation makes of what is `known`, down to the lowest
        level whatever the policy's floors: the strongest plan that stays as it is."""
        out = np.zeros((len(self.trials), len(self.budgets)))
        for row, trial in enumerate(self.trials):
            for case in trial.cases:
                context = self._context(known(trial, case), self._free)
                for column, budget in enumerate(self.budgets):
                    plan = make_policy("static", context, budget).assign(None)
                    out[row, column] += self._harm(case, plan.bits)
        return out

    def _harm(self, case: Case, bits: Bits) -> float:
        level = bits.astype(np.int64) - self.sizes.lowest
        return float(np.take_along_axis(case.damage, level[..., None], axis=-1).sum())
