"""The runtime planner (paper 3.2, Algorithm 1): pure functions, one file for each of its names.

`Planner(PlanContext.of(...)).step(table, observation)` returns the plan of one scheduler step.
"""

from pagedweight.core.planner.context import PlanContext, TableState
from pagedweight.core.planner.initial import InitialPlan, initial_plan
from pagedweight.core.planner.plan import Plan
from pagedweight.core.planner.queue import PlanQueue, refresh_plan_queue, select_best_plan
from pagedweight.core.planner.step import Planner, plan_step

__all__ = [
    "InitialPlan",
    "Plan",
    "PlanContext",
    "PlanQueue",
    "Planner",
    "TableState",
    "initial_plan",
    "plan_step",
    "refresh_plan_queue",
    "select_best_plan",
]
