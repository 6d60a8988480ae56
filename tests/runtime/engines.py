"""A stand-in for the engine: a block pool, a load that rises and falls, ranks, late reports."""

from collections import deque

import numpy as np
from ranks import LEVELS, DealtTier, RandomTier, rank_of

from pagedweight.core.calibration import Calibration
from pagedweight.core.holdings import Holding, Holdings
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import PlanContext, Planner
from pagedweight.core.planner.holdings import HoldingsPlanner
from pagedweight.core.policy import Policy
from pagedweight.memory.fake import FakeDevice, fail_at
from pagedweight.runtime.controller import BlockDemand, Controller, KVShape
from pagedweight.runtime.dispatch import DispatchConfig
from pagedweight.runtime.granules import GranuleLedger, GranuleState
from pagedweight.runtime.integrity import check_worker
from pagedweight.runtime.messages import StepPlan, merged

PAGE = 4096
POLICY = Policy(offload_blocks=3, reload_blocks=8, dwell_steps=6)


class Blocks:
    """The engine's block pool: lowest numbers first; parked granules are out of circulation."""

    def __init__(self, total, per_granule, usable):
        self.total, self.per_granule = total, per_granule
        self.parked = set(range(-(-total // per_granule))) - set(usable)
        self.used = {0}
        self.drained = {}

    def granule(self, number):
        return set(range(number * self.per_granule, (number + 1) * self.per_granule))

    def free(self):
        out = set(range(self.total)) - self.used
        for granule in self.parked:
            out -= self.granule(granule)
        return sorted(out.difference(*self.drained.values()))

    def unpark(self, granule):
        self.parked.remove(granule)

    def in_use(self, granule):
        return len(self.granule(granule) & self.used)

    def is_empty(self, granule):
        return not self.in_use(granule)

    def drain(self, granule):
        left = self.granule(granule) & self.used
        assert not left & self.drained.get(granule, set()), "a drained block was handed out"
        self.drained[granule] = self.granule(granule) - left
        if not left:
            del self.drained[granule]
            self.parked.add(granule)
        return len(left)

    def refill(self, granule):
        del self.drained[granule]

    @property
    def held_back(self):
        return sum(map(len, self.drained.values()))


class Engine:
    """Runs controller and ranks against a load given as blocks wanted; see `step`."""

    def __init__(
        self,
        ranks=1,
        lag=0,
        pages=104,
        granules=24,
        lazy=True,
        bits=6,
        reserve=12,
        pages_per_step=None,
        dealt=None,
        block=3000,
        size=2,
        **config,
    ):
        """pages: of each rank, or a list of them. block: bytes in each layer. dealt: holdings
        [(layers, experts)], one a rank, with KV of their own layers; None: every rank holds all
        rows. size: blocks of a granule, which is as large as one of two `block`s."""
        tier = RandomTier(layers=2, experts=4)
        if dealt is None:
            self.holdings = Holdings.one(tier.index, ranks)
        else:
            parts = [Holding(*part, (rank,)) for rank, part in enumerate(dealt)]
            self.holdings = Holdings(tier.index, parts)
        parts = [self.holdings.parts[self.holdings.of_rank(rank)] for rank in range(ranks)]
        self.devices = [FakeDevice(PAGE, lazy) for _ in range(ranks)]
        self.ranks = [
            rank_of(
                device,
                pages[rank] if isinstance(pages, list) else pages,
                bits=bits,
                granules=granules,
                tier=tier if dealt is None else DealtTier(tier, part),
                reserve=reserve,
                layers=len(part.layers),
                block=block,
            )
            for rank, (device, part) in enumerate(zip(self.devices, parts, strict=True))
        ]
        for number, rank in enumerate(self.ranks):
            rank.worker.rank = number
            if dealt is not None:
                rank.worker.number_rows(self.holdings.rows[number])
            rank.worker.apply(StepPlan(0, grow=tuple(range(self.fitting(granules)))))
        for rank in self.ranks:
            rank.worker.pages_per_step = pages_per_step
        usable = self.ranks[0].worker.kv.backed
        self.blocks = Blocks(size * granules, size, usable)
        index, sizes, rng = tier.index, tier.sizes, np.random.default_rng(0)
        damage = rng.lognormal(0, 2, (*index.shape, 1)) * 4.0 ** -np.arange(len(LEVELS))
        calibration = Calibration(LEVELS, damage, np.full((2, 4), 0.25), None, True, ())
        context = PlanContext.of(index, sizes, calibration, POLICY, PAGE)
        planner = Planner(context)
        if dealt is not None:
            contexts = [context.of_holding(part) for part in parts]
            planner = HoldingsPlanner(contexts, self.holdings)
        self.controller = Controller(
            WeightPageTable(index, sizes, bits),
            planner,
            POLICY,
            GranuleLedger(size * granules, size, usable),
            [self.kv_shape(len(part.layers), block, size) for part in self.holdings.parts],
            PAGE,
            config=DispatchConfig(**{"rows_per_batch": 8, "hold_off_steps": 3, **config}),
            holdings=self.holdings,
            free_pages=() if dealt is None else [r.pool.can_take() for r in self.ranks],
        )
        self.rng = np.random.default_rng(1)
        self.reports, self.lag, self.short = deque(), lag, 0
        self.history = []

    def fitting(self, granules):
        """Granules that all ranks can back now; those that have some can back as many in all."""

        def fit(rank):
            kv, room = rank.worker.kv, rank.pool.can_take()
            return next(n for n in range(granules, -1, -1) if kv.pages_for(range(n)) <= room)

        return min(len(rank.worker.kv.backed) or fit(rank) for rank in self.ranks)

    @staticmethod
    def kv_shape(layers, block, size):
        pages = -(-2 * block // PAGE) + (2 * block % PAGE > 0)
        return KVShape(layers * 2 * block // size, layers * pages)

    def demand(self, wanted):
        """Give requests up to `wanted` blocks; what is lacking is pending."""
        self.blocks.used = set(sorted(self.blocks.used)[: wanted + 1])
        lacking = wanted + 1 - len(self.blocks.used)
        free = self.blocks.free()
        self.blocks.used |= set(free[:lacking])
        pending = max(0, lacking - len(free))
        left = max(0, len(free) - lacking) + self.blocks.held_back
        return BlockDemand(left, pending, min(pending, 1))

    def hear(self):
        while len(self.reports) > self.lag:
            self.controller.hear(self.reports.popleft(), self.blocks)

    def step(self, wanted):
        """One step in which requests want `wanted` blocks in all."""
        self.hear()
        demand = self.demand(wanted)
        self.short += demand.pending_blocks
        plan = self.controller.step(demand, self.blocks)
        for rank in self.ranks:
            rank.worker.apply(plan)
        self.reports.append(merged([rank.worker.report() for rank in self.ranks]))
        self.check()
        for device in self.devices:
            device.launch(lambda: None)
            device.run(until=max(device.executed, device.submitted - int(self.rng.integers(0, 60))))
            device.run_uploads(int(self.rng.integers(0, 4)))
        self.history.append((self.controller.status, len(self.blocks.used)))
        return plan

    def check(self):
        """No block without memory on every rank is ever in circulation; everything is sound."""
        self.controller.table.check_integrity()
        ledger = self.controller.granules
        draining = set(ledger.having(GranuleState.DRAINING))
        usable = set(ledger.having(GranuleState.USABLE)) | draining
        assert usable == set(range(ledger.states.size)) - self.blocks.parked
        assert draining == set(self.blocks.drained)
        for state in GranuleState:
            counted = int((ledger.states == state).sum())
            assert ledger.count(state) == len(ledger.having(state)) == counted
        for rank in self.ranks:
            assert usable <= set(rank.worker.kv.backed)
            fault, rank.device.fault = rank.device.fault, fail_at()
            check_worker(rank.worker)
            rank.device.fault = fault

    def bits(self):
        return [rank.table.committed_bits.tolist() for rank in self.ranks]

    def idle(self, limit=400):
        """Steps without load until the controller has nothing to do; returns how many."""
        for count in range(limit):
            self.hear()
            if not self.controller.wants_step(self.demand(0)):
                return count
            self.step(0)
        raise AssertionError(f"still busy after {limit} idle steps: {self.controller.status}")
