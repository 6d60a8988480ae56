"""The runtime planner as a policy: what a server under this load would hold at each moment.

`Planner.step` is driven as the controller drives it, with the page table settled between steps.
KV is counted in blocks of one byte over a pool that leaves weights `budget_bytes`, so that eq. 7
asks for exactly what is too much.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from pagedweight.core.observation import BatchSignals, KVPressure, Observation
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner.context import PlanContext
from pagedweight.core.planner.initial import initial_plan
from pagedweight.core.planner.step import Planner
from pagedweight.core.policies.assignment import Assignment, assignment_of
from pagedweight.errors import UserError

Load = Literal["requests", "constant"]
"""requests: KV falls to nothing between pieces of text and bits come back, then it takes all but
the budget again. constant: it takes all but the budget all the time."""
LOADS: tuple[Load, ...] = ("requests", "constant")
MOST_STEPS = 10_000


class PagedPolicy:
    """PagedWeight's planner under a constant or a returning load.

    Starts as a server starts: the initial plan of the budget under constant load; resting bits
    when requests come and go. Raises UserError when the floors do not fit the budget.
    """

    def __init__(self, context: PlanContext, budget_bytes: int, load: Load = "requests") -> None:
        self.context = context
        self.budget_bytes = budget_bytes
        self.load = load
        start = initial_plan(context, budget_bytes).bits  # whether it fits at all, too
        if load == "requests" and context.policy.use_movement:
            start = context.resting_bits
        self._table = WeightPageTable(context.index, context.sizes, start)
        self._planner = Planner(context)
        self._step = 0

    def under(self, budget_bytes: int) -> None:
        """Another budget from the next assignment on. UserError below the floors, or when the load
        never goes: bits come back in pauses only."""
        if self.load != "requests":
            raise UserError(f"a budget that changes needs the load 'requests', not {self.load!r}")
        initial_plan(self.context, budget_bytes)
        self.budget_bytes = budget_bytes

    def assign(self, signals: BatchSignals | None) -> Assignment:
        """See `PrecisionPolicy`: the load of what comes next arrives, the planner makes room."""
        if self.load == "requests":
            everything = self.context.sizes.total(self.context.resting_bits)
            self._settle(everything + self.context.policy.reload_blocks, signals)
        self._settle(self.budget_bytes, signals)
        held = self.context.sizes.total(self._table.desired_bits)
        if held > self.budget_bytes and self.context.policy.use_movement:
            raise UserError(
                f"the policy's floors hold {held} bytes, more than the budget of "
                f"{self.budget_bytes}: allow lower floors or give more"
            )
        return assignment_of(self.context, self._table.desired_bits)

    def _settle(self, weight_bytes: int, signals: BatchSignals | None) -> None:
        """Steps under a load that leaves weights `weight_bytes`, until nothing moves any more."""
        waited = False
        for _ in range(MOST_STEPS):
            self._step += 1
            kv = self._pressure(weight_bytes)
            plan = self._planner.step(self._table, Observation(self._step, kv, signals))
            if plan.kind == "none":
                if waited:
                    return
                waited = True
                self._step += self.context.policy.dwell_steps  # steps in which nothing is due
                continue
            waited = False
            bits = self._table.desired_bits.copy()
            bits[plan.rows] = plan.to_bits
            self._table = WeightPageTable(self.context.index, self.context.sizes, bits)
        raise RuntimeError(f"bits still move after {MOST_STEPS} steps of a constant load")

    def _pressure(self, weight_bytes: int) -> KVPressure:
        """KV such that exactly the weights beyond `weight_bytes` are too many.

        What weights leave of that is headroom, which they may have back when the load has gone.
        One request waits for that, so an emergency is as large: what eq. 7 keeps free is added,
        since an emergency keeps nothing.
        """
        policy, sizes = self.context.policy, self.context.sizes
        margin = weight_bytes - sizes.total(self._table.desired_bits)
        most = sizes.total(np.full_like(self._table.desired_bits, sizes.planes))
        short, idle = max(0, -margin), weight_bytes > self.budget_bytes
        free = (policy.reload_blocks if idle else policy.offload_blocks) + 1
        return KVPressure(
            block_bytes=1,
            total_blocks=free + most + 1,
            usable_blocks=free,
            free_blocks=free,
            pending_blocks=short,
            head_blocks=short + policy.offload_blocks if short else 0,
            headroom_bytes=max(0, margin),
        )
