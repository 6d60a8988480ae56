"""The plan queue: RefreshPlanQueue and SelectBestPlan (Algorithm 1 lines 8 and 11)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pagedweight.core.planner.plan import Plan
from pagedweight.core.planner.score import Damage


@dataclass(frozen=True, eq=False)
class PlanQueue:
    """Q_t: candidate plans, and what the planner remembers from step to step.

    plans:              the newest of each floor stage, most protective first.
    emergency:          names of the emergency stages among them.
    last_pressure_step: step of the latest trigger, None before the first.
    damage:             scores kept while the observation's signals stay the same object.
    exchange_bytes:     what an exchange has lowered rows for and not yet spent on rises.
    settled:            the scores under which nothing was left to exchange, None before.
    """

    plans: tuple[Plan, ...] = ()
    emergency: frozenset[str] = frozenset()
    last_pressure_step: int | None = None
    damage: Damage | None = None
    exchange_bytes: int = 0
    settled: Damage | None = None


def refresh_plan_queue(queue: PlanQueue, plan: Plan, emergency: bool = False) -> PlanQueue:
    """`plan` takes the place of its stage's older one; the newest observation wins."""
    names = [old.stage for old in queue.plans]
    at = names.index(plan.stage) if plan.stage in names else len(names)
    marked = {plan.stage} if emergency else set()
    return replace(
        queue,
        plans=(*queue.plans[:at], plan, *queue.plans[at + 1 :]),
        emergency=(queue.emergency - {plan.stage}) | marked,
    )


def select_best_plan(queue: PlanQueue) -> Plan:
    """The most protective stage's plan that meets its target.

    When none does, the one that returns most, except that an emergency plan is taken where that one
    would leave a request preempted or stuck. A looser stage always predicts less damage, so picking
    by damage would make the floors of the stricter ones inert. Raises ValueError when no usual
    stage has a plan.
    """
    usual = [plan for plan in queue.plans if plan.stage not in queue.emergency]
    for plan in usual:
        if plan.satisfied:
            return plan
    best = max(usual, key=lambda plan: plan.stage_bytes)
    for plan in queue.plans:
        helps = plan.stage_bytes > best.stage_bytes
        if plan.stage in queue.emergency and helps and plan.target_bytes > best.stage_bytes:
            best = plan
    return best
