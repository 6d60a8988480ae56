"""Random transitions under load, and the same bits played again one after the other.

What both runs have in common is the requests and, at every model step, the bits. If tokens differ,
some step read a plane, a table or a KV block at a moment when it was not what it had to be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pagedweight.core.planner import Plan
from pagedweight.runtime.granules import GranuleState
from pagedweight.runtime.messages import StepPlan
from pagedweight.runtime.trace import BitTrace
from pagedweight.serving.elastic.tracing import Replay


class RandomPlanner:
    """Sends up to `rows` random rows to random levels at every step, as far as memory allows."""

    def __init__(self, seed: int, rows: int = 128) -> None:
        self.rng, self.asked, self.rows = np.random.default_rng(seed), 0, rows

    def step(self, table, observation) -> Plan:
        del observation
        lower = bool(self.rng.integers(2))
        free = np.flatnonzero(table.desired_bits == table.committed_bits)
        rows = np.sort(self.rng.choice(free, min(self.rows, len(free)), replace=False))
        now = table.committed_bits[rows]
        levels = table.sizes.levels
        goal = self.rng.integers(levels[0], levels[-1] + 1, len(rows))
        keep = goal < now if lower else goal > now
        rows, now, goal = rows[keep], now[keep].astype(np.int32), goal[keep].astype(np.int32)
        if not len(rows):
            return Plan.none()
        self.asked += len(rows)
        delta = np.array(
            [table.sizes.delta(r % 2, a, b) for r, a, b in zip(rows, now, goal, strict=True)]
        )
        kind = "offload" if lower else "reload"
        return replace(
            Plan.none("random"), kind=kind, rows=rows, from_bits=now, to_bits=goal, delta=delta
        )


@dataclass(frozen=True)
class Chaos:
    """tokens: of every request, in order; trace: bits by model step; moved: rows that changed."""

    tokens: list[list[int]]
    trace: BitTrace
    moved: int
    steps: int


def random_run(engine, asked, length, seed, rows=128) -> Chaos:
    """Serve `asked` while rows go to random levels at every step."""
    controller, counters = engine.control.controller, engine.memory.counters
    planner, controller._planner = controller._planner, RandomPlanner(seed, rows)
    before = counters.rows_lowered + counters.rows_raised
    trace, last, steps = BitTrace(), [engine.bits], [0]
    trace.record(0, np.zeros_like(last[0]), last[0])
    original = engine.worker.execute_model

    def recorded(output):
        plan = getattr(output, "pagedweight", None)
        if plan is not None:
            engine.memory.apply(plan)
            output.pagedweight = None
        if output.total_num_scheduled_tokens:
            steps[0] += 1
            trace.record(steps[0], last[0], engine.bits)
            last[0] = engine.bits
        engine.worker._plan = plan
        return original(output)

    engine.worker.execute_model = recorded
    try:
        names = engine.add(asked, length)
        done = engine.run(settle=False)
    finally:
        engine.worker.execute_model, controller._planner = original, planner
    moved = counters.rows_lowered + counters.rows_raised - before
    return Chaos([done.get(name, []) for name in names], trace, moved, steps[0])


def serial_run(engine, asked, length, trace, spare) -> list[list[int]]:
    """Serve `asked` again, every change of `trace` whole on entry to its model step.

    The engine is settled, at the bits of the trace's step 0. `spare`: granules that KV gives back
    before, because a replay lowers and raises whole steps. Afterwards the rank is where the
    controller believes it to be, and other runs may follow.
    """
    controller, control = engine.control.controller, engine.control
    start, granules = engine.bits, controller.granules
    given = granules.give_back(spare, control.parking, controller.step_number)
    assert given == spare, f"KV gave back {given} of {spare} granules"
    shrink = tuple(granules.having(GranuleState.SHRINKING))
    engine.memory.apply(StepPlan(controller.step_number, shrink=shrink))
    forget_batches(engine)
    control._replay, control._model_steps = Replay(trace, start), 0
    try:
        names = engine.add(asked, length)
        done = engine.run()
        back, number = BitTrace(), control._model_steps + 1
        back.record(number, engine.bits, start)
        engine.memory.apply(back.plan(number, engine.bits))
        forget_batches(engine)
        assert np.array_equal(engine.bits, start), "the rank did not come back from its replay"
    finally:
        control._replay = None
    return [done.get(name, []) for name in names]


def forget_batches(engine) -> None:
    """Let every batch come to its end and be forgotten: those of a replay have their own numbers,
    which must not be taken for the controller's."""
    for _ in range(1000):
        engine.quiet()
        engine.memory.apply(StepPlan(engine.control.controller.step_number, oldest=1 << 40))
        if not engine.memory.mover.statuses():
            return
    raise AssertionError(f"batches without an end: {engine.memory.mover.statuses()}")


def differences(found, wanted) -> list[str]:
    """For each request that differs: its number, the first token that does, and how many do."""
    lines = []
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a != b:
            off = [n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
            first = off[0] if off else min(len(a), len(b))
            lines.append(f"request {number}: {len(a)}/{len(b)} tokens, first off at {first}")
    return lines
