"""What the scheduler's process shows of itself: samples into the timeline and the metrics.

A sample is taken when something changed (bits, backed blocks, a plan, a preemption, a refusal),
else once in `EVERY_SECONDS` while steps go on, and once when the engine falls idle.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedweight import __version__
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.page_table import PageState
from pagedweight.core.planner import PlanContext
from pagedweight.core.planner.score import Damage, predict_damage
from pagedweight.runtime.controller import BlockDemand, Status
from pagedweight.runtime.timeline import BudgetSplit, Header, Sample, TimelineWriter
from pagedweight.serving.elastic.metrics import Metrics

if TYPE_CHECKING:
    from pagedweight.serving.elastic.control import Control

logger = logging.getLogger("vllm.pagedweight")
EVERY_SECONDS = 0.02
FLUSH_SECONDS = 1.0
Clock = Callable[[], float]


class Sink(Protocol):
    """Takes samples: `TimelineWriter`, `Metrics`. OSError ends a sink, not the service."""

    def write(self, sample: Sample) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def header_of(
    control: Control, checkpoint: Checkpoint, block_tokens: int, engine: int, started: float
) -> Header:
    """The timeline's header; blocks are counted without the null block. Bytes are of one rank of
    each holding."""
    budgets, policy, granules = control.budgets, control.context.policy, control.controller.granules
    budget, page = budgets[0], budgets[0].page_bytes
    granule = sum(own.granule_pages for own in budgets) * page
    return Header(
        started=started,
        version=__version__,
        model=checkpoint.path.resolve().name,
        precision="static" if control.options.still else "elastic",
        levels=checkpoint.bits,
        ranks=control.holdings.ranks,
        engine=engine,
        budget=BudgetSplit(
            total=sum(own.pages for own in budgets) * page,
            page=page,
            reserve=sum(own.reserve for own in budgets) * page,
            weights_at_start=sum(own.weight_pages for own in budgets) * page,
            weights_at_floor=sum(own.floor_pages for own in budgets) * page,
            kv_at_start=budget.usable_granules * granule,
            kv_reachable=budget.reachable_blocks // budget.granule_blocks * granule,
        ),
        block_tokens=block_tokens,
        block_bytes=sum(own.block.nbytes for own in budgets),
        granule_blocks=budget.granule_blocks,
        usable_at_start=granules.usable_blocks,
        reachable=granules.total_blocks - 1,
        offload_blocks=policy.offload_blocks,
        reload_blocks=policy.reload_blocks,
        dwell_steps=policy.dwell_steps,
    )


def sinks_of(header: Header, timeline: str | None) -> list[Sink]:
    """Metrics always, a timeline when a path is given (with the engine's number from the second
    engine on). Raises UserError when that cannot be written."""
    sinks: list[Sink] = [Metrics(header)]
    if timeline is not None:
        path = Path(timeline)
        if header.engine:
            path = path.with_name(f"{path.stem}.{header.engine}{path.suffix}")
        sinks.append(TimelineWriter(path, header))
    return sinks


def damage_at(context: PlanContext, damage: Damage, bits: NDArray[np.int32]) -> float:
    """Eq. 8 summed over all steps between `bits` [rows] and the highest level."""
    missing = context.between(context.levels_of(bits), None)
    return float(np.vdot(damage.predicted, missing.astype(np.float32))) * context.damage_unit


class Recorder:
    """`begin`, `scheduled` around every step, `idle` when there is none, `close` at the end."""

    def __init__(
        self,
        control: Control,
        sinks: list[Sink],
        wall: Clock = time.time,
        monotonic: Clock = time.monotonic,
    ) -> None:
        self._control = control
        self._sinks = sinks
        self._wall, self._monotonic = wall, monotonic
        self._at_rest = [predict_damage(context, None) for context in control.contexts]
        self._step = self._scheduled = self._generated = 0
        self._floor_hits, self._damage_taken = 0, 0.0
        self._queues = {"running": 0, "waiting": 0, "kv_demanded": 0, "kv_used": 0}
        self._status: Status | None = None
        self._times = (wall(), monotonic())
        self._last: Sample | None = None
        self._seen: tuple[float, ...] = ()
        self._flushed = self._times[1]
        self._emit(True)

    def begin(self, demand: BlockDemand, running: int, waiting: int) -> None:
        """A step is about to be planned for these queues."""
        self._observe(demand, running, waiting)
        self._step += 1

    def scheduled(self, tokens: int) -> None:
        """The step was planned and vLLM has scheduled `tokens` tokens."""
        self._scheduled += tokens
        self._status = status = self._control.controller.status
        if status is not None:
            self._floor_hits += status.floor_hit
            self._damage_taken += max(0.0, status.predicted_damage)
        self._emit(status is not None and status.plan_kind != "none")

    def generated(self, tokens: int) -> None:
        """Requests got `tokens` new tokens."""
        self._generated += tokens

    def idle(self, demand: BlockDemand, running: int, waiting: int) -> None:
        """No step comes until there are requests again."""
        last = self._last
        self._observe(demand, running, waiting)
        if any(getattr(last, name) != value for name, value in self._queues.items()):
            self._status = None
            self._emit(True)
        self._flush()

    def close(self) -> None:
        """Write what is left."""
        self._times = (self._wall(), self._monotonic())
        self._status = None
        self._emit(True)
        for sink in list(self._sinks):
            self._try(sink, sink.close)

    # -- inside ----------------------------------------------------------------------------------

    def _observe(self, demand: BlockDemand, running: int, waiting: int) -> None:
        used = self._control.controller.granules.usable_blocks - demand.free_blocks
        self._times = (self._wall(), self._monotonic())
        self._queues = {
            "running": running,
            "waiting": waiting,
            "kv_demanded": used + demand.pending_blocks,
            "kv_used": used,
        }

    def _emit(self, always: bool) -> None:
        now = self._times[1]
        seen = self._what_counts()
        due = self._last is None or now - self._last.monotonic >= EVERY_SECONDS
        if not (always or due or seen != self._seen):
            return
        self._seen, self._last = seen, self._sample()
        for sink in list(self._sinks):
            self._try(sink, lambda sink=sink: sink.write(self._last))
        if now - self._flushed >= FLUSH_SECONDS:
            self._flush()

    def _what_counts(self) -> tuple[float, ...]:
        """A change of these is written at once."""
        control, counters = self._control, self._control.controller.counters
        table, status = control.controller.table, self._status
        return (
            *(status.mean_bits if status else table.mean_bits()),
            control.controller.granules.usable_blocks,
            control.preemptions,
            counters.get("rolled_back", 0),
        )

    def _sample(self) -> Sample:
        control, status = self._control, self._status
        controller, counters = control.controller, control.controller.counters
        gate_up, down, both = controller.table.mean_bits()
        granules, table = controller.granules, controller.table
        return Sample(
            time=self._times[0],
            monotonic=self._times[1],
            step=self._step,
            **self._queues,
            kv_usable=granules.usable_blocks,
            kv_reachable=granules.total_blocks - 1,
            bits=both,
            bits_gate_up=gate_up,
            bits_down=down,
            device_bytes=table.bytes_in(PageState.DEVICE),
            transfer_bytes=table.bytes_in(PageState.IN_TRANSFER),
            kv_bytes=(granules.usable_blocks + 1) * sum(b.block.nbytes for b in control.budgets),
            free_bytes=self._free_pages * control.budgets[0].page_bytes,
            target_bytes=status.target_bytes if status else 0,
            plan=status.plan_kind if status else "none",
            stage=status.stage if status else "",
            plan_damage=status.predicted_damage if status else 0.0,
            damage=self._damage(table.committed_bits),
            rows_waiting=status.rows_waiting if status else 0,
            batches=status.batches_under_way if status else 0,
            preemptions=control.preemptions,
            tokens_scheduled=self._scheduled,
            tokens_generated=self._generated,
            rows_lowered=counters.get("rows_lowered", 0),
            rows_raised=counters.get("rows_raised", 0),
            copied_bytes=counters.get("uploaded_bytes", 0),
            compacted_bytes=counters.get("compacted_bytes", 0),
            floor_hits=self._floor_hits,
            damage_taken=self._damage_taken,
            rollbacks=counters.get("rolled_back", 0),
        )

    @property
    def _free_pages(self) -> int:
        """Ranks do not report when precision is static: then the division at the start holds."""
        control = self._control
        if not control.options.still:
            return int(control.controller.free_pages.sum())
        return sum(own.free_pages for own in control.budgets)

    def _damage(self, bits: NDArray[np.int32]) -> float:
        """Of `bits` [rows] under the latest signals that were planned with."""
        control = self._control
        of = [q.damage or rest for q, rest in zip(control.queues, self._at_rest, strict=True)]
        each = zip(control.contexts, of, control.holdings.rows, strict=True)
        return sum(damage_at(context, damage, bits[rows]) for context, damage, rows in each)

    def _flush(self) -> None:
        self._flushed = self._times[1]
        for sink in list(self._sinks):
            self._try(sink, sink.flush)

    def _try(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as error:
            logger.warning("%s: recording stops: %s", type(sink).__name__, error)
            self._sinks.remove(sink)
