"""PlanStep: one step of the runtime planner (Algorithm 1), and a holder of its queue."""

from __future__ import annotations

from dataclasses import replace

from pagedweight.core.observation import KVPressure, Observation
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner.context import PlanContext, TableState
from pagedweight.core.planner.exchange import exchange_plan
from pagedweight.core.planner.greedy import greedy_select
from pagedweight.core.planner.plan import Plan
from pagedweight.core.planner.queue import PlanQueue, refresh_plan_queue, select_best_plan
from pagedweight.core.planner.restore import restore_plan
from pagedweight.core.planner.score import Rows, offload_order, predict_damage, score_actions
from pagedweight.core.planner.target import (
    emergency_bytes,
    pressure_triggered,
    spare_bytes,
    target_bytes_from_kv_pressure,
)


def plan_step(
    table: TableState, observation: Observation, context: PlanContext, queue: PlanQueue
) -> tuple[PlanQueue, Plan]:
    """Algorithm 1: (Q_{t+1}, Pi_t). Pure: equal inputs give equal plans.

    Pi_t is an offload when pressure is triggered, a reload when there are bytes to spare and the
    dwell is over, half an exchange when there are none and signals have changed, else empty. Rows
    of a plan start from d_i; whoever carries it out writes d_i.
    """
    policy, kv = context.policy, observation.kv
    if context.steps == 0 or not policy.use_movement:
        return queue, Plan.none()
    damage = queue.damage
    if damage is None or damage.signals is not observation.signals:
        damage = predict_damage(context, observation.signals)
    rows = Rows.of(context, damage, context.levels_of(table.desired_bits))
    on_way = context.pages.held_by(table.slots) - rows.held
    queue = _refreshed(context, kv, replace(queue, damage=damage), rows, on_way)
    if pressure_triggered(kv, policy.offload_blocks):
        queue = replace(queue, last_pressure_step=observation.step, exchange_bytes=0, settled=None)
        return queue, select_best_plan(queue)
    since = queue.last_pressure_step
    if since is not None and observation.step - since < policy.dwell_steps:
        return queue, Plan.none()
    given = min(queue.exchange_bytes, max(0, kv.headroom_bytes + on_way))
    spare = max(given, spare_bytes(kv, policy.reload_blocks, on_way))
    plan = restore_plan(context, rows, spare)
    if plan.kind == "none" and not queue.exchange_bytes:
        return _exchanged(context, queue, rows)
    return replace(queue, exchange_bytes=0), plan


def _exchanged(context: PlanContext, queue: PlanQueue, rows: Rows) -> tuple[PlanQueue, Plan]:
    """The lowering half of an exchange, looked for once under the same scores and bits."""
    known = queue.damage is not None and queue.damage.signals is not None
    if not context.policy.exchange_ratio or not known or queue.settled is queue.damage:
        return queue, Plan.none()
    plan = exchange_plan(context, rows)
    if plan.kind == "none":
        return replace(queue, settled=queue.damage), plan
    return replace(queue, exchange_bytes=plan.returned_bytes), plan


def _refreshed(
    context: PlanContext, kv: KVPressure, queue: PlanQueue, rows: Rows, on_way: int
) -> PlanQueue:
    """Lines 4 to 9: the target, then a candidate plan of the floor stages into the queue.

    Stages that SelectBestPlan would not look at are not planned: those after the first that meets
    the target, and an emergency that the usual stages can end.
    """
    target = target_bytes_from_kv_pressure(kv, context.policy.offload_blocks, on_way)
    queue = replace(queue, plans=(), emergency=frozenset())
    if not target:
        return refresh_plan_queue(queue, Plan.none(context.stages[0].name))
    order = offload_order(rows.damage, rows.now)
    for stage in context.stages:
        wanted = emergency_bytes(kv, on_way) if stage.emergency else target
        if stage.emergency and wanted <= max(plan.stage_bytes for plan in queue.plans):
            continue
        plan = greedy_select(context, score_actions(rows, order, stage), wanted)
        queue = refresh_plan_queue(queue, plan, stage.emergency)
        if plan.satisfied:
            break
    return queue


class Planner:
    """A context and the queue that its steps hand on."""

    def __init__(self, context: PlanContext) -> None:
        self.context = context
        self.queue = PlanQueue()

    def step(self, table: WeightPageTable, observation: Observation) -> Plan:
        """Plan one step from `table`; the caller applies the plan (`Plan.apply`)."""
        self.queue, plan = plan_step(TableState.of(table), observation, self.context, self.queue)
        return plan
