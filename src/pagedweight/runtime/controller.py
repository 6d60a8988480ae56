"""The scheduler side of the runtime: observe, plan, move, commit, one step at a time.

Owns desired bits and the page table of record, asks the planner each step, and turns its answer
into a `StepPlan` for all ranks. Their reports come back a step or two later. It neither reads a
clock nor touches memory: the same observations and reports give the same plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pagedweight.core.holdings import Holdings
from pagedweight.core.observation import KVPressure, Observation
from pagedweight.core.page_table import PageState, WeightPageTable
from pagedweight.core.planner import Plan
from pagedweight.core.planner.target import pressure_triggered, wanted_blocks
from pagedweight.core.policy import Policy
from pagedweight.core.size_class import SizeClassPages
from pagedweight.core.size_table import IntArray
from pagedweight.runtime.dispatch import DispatchConfig, Dispatcher
from pagedweight.runtime.granules import BlockParking, GranuleLedger, GranuleState
from pagedweight.runtime.messages import Batch, StepPlan, WorkerReport, check_version, largest
from pagedweight.runtime.page_ledger import PageLedger
from pagedweight.runtime.signals import SignalWindow, whole_signals

SIGNAL_STEPS, DEALT_SIGNAL_STEPS = 4, 16
"""Steps between two reports with signals, which are larger than all the rest of a report; where
ranks hold different rows all of them have to be asked (a window is read every 16 steps)."""
DRAIN_STEPS = 4
"""Steps between two looks at granules that drain. A block that was freed since is the last that
vLLM would hand out, so that it is hardly ever missed."""
PATIENT_STEPS = 32
"""Steps without a granule of those wished for, after which memory counts as refused."""


class Planner(Protocol):
    """`core.planner.Planner`, or a recorded trace."""

    def step(self, table: WeightPageTable, observation: Observation) -> Plan: ...


@dataclass(frozen=True)
class BlockDemand:
    """The scheduler's queues in KV blocks (`KVPressure` has what the words mean). Some of
    free_blocks may be held back because their granules drain."""

    free_blocks: int
    pending_blocks: int = 0
    head_blocks: int = 0
    growth_blocks: int = 0


@dataclass(frozen=True)
class KVShape:
    """On the ranks of a holding. block_bytes: B_KV. granule_pages: most pages of a granule."""

    block_bytes: int
    granule_pages: int


@dataclass(frozen=True)
class Status:
    """The runtime at one step, for metrics and timelines. Bytes are of one rank of each holding.

    mean_bits:        committed, by weight: gate_up, down, both.
    target_bytes:     D of eq. 7, 0 without pressure.
    predicted_damage: of this step's plan, negative when it restores.
    plan_kind, stage: of this step's plan, and the floor stage it was made under.
    floor_hit:        the floors left less than D to give.
    """

    step: int
    mean_bits: tuple[float, float, float]
    bytes_on_device: int
    bytes_in_transfer: int
    usable_blocks: int
    target_bytes: int
    predicted_damage: float
    plan_kind: str
    stage: str
    floor_hit: bool
    rows_waiting: int
    batches_under_way: int
    failures: int


class Controller:
    """One for the engine, whatever the number of ranks."""

    def __init__(
        self,
        table: WeightPageTable,
        planner: Planner,
        policy: Policy,
        granules: GranuleLedger,
        kv: KVShape | Sequence[KVShape],
        page_bytes: int,
        signals: SignalWindow | None = None,
        config: DispatchConfig | None = None,
        holdings: Holdings | None = None,
        free_pages: Sequence[int] = (),
    ) -> None:
        """`table` and `granules` state what the ranks have loaded and backed; `kv`, and the
        `free_pages` that are left beside it: of each holding. `holdings` None: one rank.

        `signals` None: plans know nothing of what was routed.
        """
        self.table = table
        self.granules = granules
        self.holdings = holdings or Holdings.one(table.index)
        self.step_number = 0
        self.status: Status | None = None
        self.counters: dict[str, int] = {}
        self._planner = planner
        self._policy = policy
        self._kv = (kv,) if isinstance(kv, KVShape) else tuple(kv)
        self._granule_pages = np.array([shape.granule_pages for shape in self._kv], np.int64)
        self._page_bytes = page_bytes
        self._config = config or DispatchConfig()
        pages = SizeClassPages.of(table.sizes, page_bytes)
        self._dispatch = Dispatcher(table, pages, self._config, self.holdings)
        self._ledger = PageLedger(self.holdings, free_pages)
        self._signals = signals
        self._settled = False
        self._no_room_until = self._no_room_at = 0
        self._no_growth_until = 0
        self._planned_for: BlockDemand | None = None
        self._followed_for: BlockDemand | None = None
        self._last_pressure: int | None = None

    # -- observe ---------------------------------------------------------------------------------

    def hear(self, report: WorkerReport, parking: BlockParking) -> None:
        """What holds on all ranks after some plan (`messages.merged`); in the order of plans."""
        check_version(report)
        self._dispatch.hear(report.batches, self.step_number)
        self.granules.hear(report, parking)
        if self._signals and (signals := whole_signals(report, self.holdings)):
            self._signals.add(signals)
        # A step on which ranks need not agree has the report of one of them.
        self.counters = largest((self.counters, report.counters))
        self._ledger.hear(report)

    @property
    def free_pages(self) -> IntArray:
        """Pages that every rank of a holding had free when it was last heard of, less what was
        promised since, int64 [holdings]."""
        return self._ledger.free

    def pressure(self, demand: BlockDemand) -> tuple[KVPressure, ...]:
        """The planner's view of the KV side, for each holding."""
        granules, headroom = self.granules, self.free_pages + self._ledger.returning
        return tuple(
            KVPressure(
                block_bytes=shape.block_bytes,
                total_blocks=granules.total_blocks,
                usable_blocks=granules.usable_blocks,
                free_blocks=demand.free_blocks,
                pending_blocks=demand.pending_blocks,
                head_blocks=demand.head_blocks,
                growth_blocks=demand.growth_blocks,
                headroom_bytes=pages * self._page_bytes,
                granule_blocks=granules.granule_blocks,
            )
            for shape, pages in zip(self._kv, headroom.tolist(), strict=True)
        )

    def wants_step(self, demand: BlockDemand) -> bool:
        """Whether a step must come although nobody asks for tokens: something is under way, or
        bits may come back, because the load is not the one last planned for or dwell goes on."""
        if not self._settled:
            return True
        since = self._last_pressure
        dwelling = since is not None and self.step_number - since <= self._policy.dwell_steps
        return (dwelling or demand != self._planned_for) and not self._all_bits

    @property
    def _rows_waiting(self) -> int:
        return int((self.table.desired_bits != self.table.committed_bits).sum())

    @property
    def _rows_can_go(self) -> bool:
        """Whether rows wait for something that steps bring. Where they wait for requests to free
        the blocks of granules that drain, they have to do so first."""
        draining = self.granules.count(GranuleState.DRAINING)
        waits_for_requests = draining and self._followed_for == self._planned_for
        return bool(self._rows_waiting and not waits_for_requests)

    # -- plan ------------------------------------------------------------------------------------

    def step(self, demand: BlockDemand, parking: BlockParking) -> StepPlan:
        """The plan that goes with the scheduler's next output; calls `parking` for granules."""
        self.step_number += 1
        step, dispatch, pressures = self.step_number, self._dispatch, self.pressure(demand)
        kv = pressures[0]  # of blocks all holdings have equally many
        pressed = pressure_triggered(kv, self._policy.offload_blocks)
        if pressed:
            self._last_pressure = step
            dispatch.stay()
        self._see_to_drains(demand, kv, parking)
        plan = self._plan(pressures)
        abort, commit = dispatch.aborts(), dispatch.commits()
        lowers = dispatch.lowers(step, self.free_pages)
        raises = () if pressed else self._raises(kv, parking)
        grow = self._wishes(kv, pressed)
        if self._config.at_once:
            commit += tuple(batch.number for batch in lowers)
        dealt = self.holdings.count > 1
        signals = step % (DEALT_SIGNAL_STEPS if dealt else SIGNAL_STEPS) == 0
        self._planned_for = demand
        self._settled = plan.kind == "none" and not self._moving and not self._rows_can_go
        return StepPlan(
            step=step,
            abort=abort,
            commit=commit,
            shrink=tuple(self.granules.having(GranuleState.SHRINKING)),
            prepare=(*lowers, *raises),
            grow=grow,
            oldest=dispatch.oldest,
            agree=self._moving or bool(abort) or not self._ledger.known or (signals and dealt),
            signals=signals,
        )

    def _see_to_drains(self, demand: BlockDemand, kv: KVPressure, parking: BlockParking) -> None:
        """Granules that drain go on draining or, when what may be handed out is short, stop: they
        have their memory, so that this costs nothing, and bits stay as they are for a while."""
        granules = self.granules
        if not granules.count(GranuleState.DRAINING):
            return
        if kv.expected_free_blocks - parking.held_back <= self._policy.offload_blocks:
            granules.refill(parking, self.step_number)
            self._rest(kv)
        elif self.step_number % DRAIN_STEPS == 0:
            granules.follow(parking, self.step_number)
            self._followed_for = demand

    def _rest(self, kv: KVPressure) -> None:
        """Nothing is asked back from KV for a while, unless more of it gets free than now."""
        self._dispatch.stay()
        self._no_room_at = kv.free_blocks
        self._no_room_until = self.step_number + self._policy.dwell_steps

    def _plan(self, pressures: tuple[KVPressure, ...]) -> Plan:
        """The planner's answer, written into d."""
        signals = self._signals.current(self.step_number) if self._signals else None
        kv, dealt = pressures[0], pressures if self.holdings.count > 1 else ()
        seen = Observation(self.step_number, kv, signals, dealt)
        plan = self._planner.step(self.table, seen)
        hold = self.step_number < self._no_room_until and kv.free_blocks <= self._no_room_at
        if hold:
            plan = plan.without_rises()
        plan.apply(self.table)
        self.status = self._status(plan, kv)
        return plan

    def _raises(self, kv: KVPressure, parking: BlockParking) -> tuple[Batch, ...]:
        """Batches of rows to raise; where pages are lacking, KV is asked to give some back."""
        batches, taken, lacking = self._dispatch.raises(self.step_number, self.free_pages)
        if batches:
            self._ledger.promise(self.step_number, taken)
        elif lacking.any() and not self._ask_back(lacking, kv, parking):
            # There is not enough for a granule: no use in asking at every step.
            self._rest(kv)
        return batches

    def _ask_back(self, pages: IntArray, kv: KVPressure, parking: BlockParking) -> bool:
        """Have KV give back `pages` [holdings], if so many blocks stay free as the policy wants;
        False when nothing comes. What is free lies scattered over granules in use, so granules
        drain."""
        granules, each = self.granules, self._granule_pages
        draining = granules.count(GranuleState.DRAINING)
        coming = granules.count(GranuleState.SHRINKING) + draining
        spare = kv.expected_free_blocks - (self._policy.reload_blocks + 1)
        most = max(0, spare // kv.granule_blocks - draining)
        returning = self._ledger.returning
        short = np.maximum(0, pages - coming * each - returning)
        more = min(most, int((-(-short // each)).max()))
        given = granules.give_back(more, parking, self.step_number)
        return bool(given or coming or returning.any() or self._dispatch.under_way)

    @property
    def _moving(self) -> bool:
        under_way = self._dispatch.under_way or self.granules.in_transit
        return bool(under_way or self._ledger.returning.any())

    def _wishes(self, kv: KVPressure, pressed: bool) -> tuple[int, ...]:
        """Granules to grow by: what pressure wants, or what nobody else has a use for."""
        count = 0
        if pressed:
            threshold = self._policy.offload_blocks
            wanted = wanted_blocks(kv, threshold, kv.expected_free_blocks)
            count = -(-wanted // kv.granule_blocks)
        elif self._all_bits and not (self._dispatch.under_way or self._rows_waiting):
            count = self._left_over()
        if self.holdings.count > 1:
            count = self._affordable(count)
        self.granules.keep(count, self.step_number)
        return self.granules.wish(count, self.step_number)

    def _left_over(self) -> int:
        """Granules that nobody else has a use for; none for a while when ranks are refused their
        memory, or an idle engine would ask at every step for good."""
        if self.granules.stalled(self.step_number) > PATIENT_STEPS:
            self._no_growth_until = self.step_number + 8 * PATIENT_STEPS
        if self.step_number < self._no_growth_until:
            return 0
        return int((self.free_pages // self._granule_pages).min())

    def _affordable(self, count: int) -> int:
        """Of `count` granules those that all ranks can back at once: where ranks hold different
        rows, one that has pages first would back granules that the others cannot follow to."""
        growing = self.granules.count(GranuleState.GROWING)
        more = int((self._ledger.unasked // self._granule_pages).min())
        more = max(0, min(count - growing, more))
        if more:
            self._ledger.wish(self.step_number, more * self._granule_pages)
        return min(count, growing + more)

    @property
    def _all_bits(self) -> bool:
        """Every row is to have all its bits: what is left over is for KV."""
        return bool((self.table.desired_bits == self.table.sizes.planes).all())

    def _status(self, plan: Plan, kv: KVPressure) -> Status:
        table, dispatch = self.table, self._dispatch
        pressed = pressure_triggered(kv, self._policy.offload_blocks)
        return Status(
            step=self.step_number,
            mean_bits=table.mean_bits(),
            bytes_on_device=table.bytes_in(PageState.DEVICE),
            bytes_in_transfer=table.bytes_in(PageState.IN_TRANSFER),
            usable_blocks=self.granules.usable_blocks,
            target_bytes=plan.target_bytes if pressed else 0,
            predicted_damage=plan.damage,
            plan_kind=plan.kind,
            stage=plan.stage,
            floor_hit=pressed and not plan.satisfied,
            rows_waiting=self._rows_waiting,
            batches_under_way=dispatch.under_way,
            failures=dispatch.failures,
        )
