"""An engine that only moves memory: the real controller, rank and kernels, without vLLM around.

A step is the routed experts of all layers and the dense products of the rest of the model
(attention projections, shared expert; no attention), in one CUDA graph. Steps run one ahead of what
the scheduler knows, as with vLLM's asynchronous scheduling:

    host    plan s, apply, launch s | wait for s-1, hear its report | plan s+1, apply, launch ...
    GPU     ... step s-1 ........... step s .......................... step s+1 ...
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagedweight.bench.layers import ModelShape
from pagedweight.bench.synthetic import spread_damage
from pagedweight.core.calibration import Calibration
from pagedweight.core.geometry import LayerShape
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.planner import PlanContext, Planner
from pagedweight.core.policy import Policy
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.kernels.cuda.kernel import CudaKernel
from pagedweight.memory.cuda.device import CudaDevice
from pagedweight.memory.interface import Bytes
from pagedweight.memory.kv_region import KVRegion, strided_granules
from pagedweight.memory.pinned_tier import PinnedTier
from pagedweight.runtime.controller import BlockDemand, Controller, KVShape
from pagedweight.runtime.dispatch import DispatchConfig
from pagedweight.runtime.granules import GranuleLedger
from pagedweight.runtime.messages import StepPlan, WorkerReport
from pagedweight.runtime.startup import open_rank, reserve_pages

LEVELS = (2, 3, 4, 5, 6)
POLICY = Policy(offload_blocks=32, reload_blocks=96, dwell_steps=16)


@dataclass(frozen=True)
class Setting:
    """memory: bytes for experts and KV. reserve_rows: rows of each kind whose tables fit in the
    reserve. rows_per_batch: see `DispatchConfig`. pages_per_step: see `MemoryWorker`. block: bytes
    of a KV block in one layer."""

    model: ModelShape
    layers: int = 24
    memory: int = 16 << 30
    reserve_rows: int = 256
    rows_per_batch: int = 512
    page_bytes: int = 16 << 20
    pages_per_step: int | None = 32
    batch: int = 32
    block: int = 131072


class OneLayer:
    """A host tier of one layer: random codes, centroids of the size that weights have."""

    def __init__(self, shape: LayerShape, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.index, self.shape = BlockIndex(1, shape.experts), shape
        self.sizes = SizeTable.of(shape, LEVELS)
        self._codes = rng.integers(0, 256, 2 * max(self.sizes.plane_bytes), dtype=np.uint8)
        self._tables = {
            (kind, bits): _centroids(rng, block.padded_rows << bits, block.cols)
            for kind, block in enumerate(shape.blocks)
            for bits in LEVELS
        }

    def plane(self, row: int, plane: int) -> Bytes:
        start = 128 * (row * LEVELS[-1] + plane) % max(self.sizes.plane_bytes)
        return self._codes[start : start + self.sizes.plane_bytes[row % 2]]

    def table(self, row: int, bits: int) -> Bytes:
        return self._tables[row % 2, bits]


def _centroids(rng: np.random.Generator, count: int, cols: int) -> Bytes:
    """bfloat16 bytes of `count` normal numbers of variance 1 / cols."""
    numbers = rng.standard_normal(count, np.float32) / np.float32(cols**0.5)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


class RepeatedTier(PinnedTier):
    """`layers` layers that all read the same pinned bytes: what moves is what counts here."""

    def __init__(self, one: OneLayer, layers: int, device: CudaDevice) -> None:
        super().__init__(one, device.host_memory)
        self.index = BlockIndex(layers, one.shape.experts)
        self._layers = self._layers * layers
        self._bases = np.repeat(self._bases, layers)


class Model:
    """One step of `layers` layers as a CUDA graph, captured once."""

    def __init__(self, setting: Setting, tables: tuple, device: CudaDevice) -> None:
        shape, at = setting.model.layer, device.torch_device
        generator = torch.Generator(at).manual_seed(0)
        hidden, top_k = shape.hidden, setting.model.top_k
        self._x = torch.randn((setting.batch, hidden), generator=generator, device=at).bfloat16()
        scores = torch.rand(
            (setting.layers, setting.batch, shape.experts), generator=generator, device=at
        )
        self._ids = scores.topk(top_k, dim=2).indices.int()
        self._weights = torch.full((setting.batch, top_k), 1 / top_k, device=at)
        self._out = torch.empty_like(self._x)
        wide = 4 * shape.intermediate
        self._dense = [
            [
                torch.randn(size, generator=generator, device=at).bfloat16() * size[0] ** -0.5
                for size in ((hidden, 4 * hidden), (hidden, 2 * wide), (wide, hidden))
            ]
            for _ in range(setting.layers)
        ]
        self._setting, self._tables, self._kernel = setting, tables, CudaKernel()
        self._run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()

    def _run(self) -> None:
        for layer in range(self._setting.layers):
            self._rest(layer)
            self._kernel(
                self._x,
                self._weights,
                self._ids[layer],
                self._setting.model.layer,
                self._tables[layer],
                torch.bfloat16,
                self._setting.model.activation,
                self._out,
            )

    def _rest(self, layer: int) -> None:
        attention, up, down = self._dense[layer]
        self._x @ attention
        (self._x @ up)[:, : down.shape[0]] @ down

    def launch(self) -> None:
        self.graph.replay()


class Parking:
    """`used` blocks from below are held by requests; a granule above them has none in use."""

    def __init__(self, used: int, granule_blocks: int) -> None:
        self._used, self._granule_blocks = used, granule_blocks

    def unpark(self, granule: int) -> None:
        """The blocks count as free from now on; nobody takes them here."""

    def in_use(self, granule: int) -> int:
        return 0 if granule * self._granule_blocks > self._used else self._granule_blocks

    def is_empty(self, granule: int) -> bool:
        return not self.in_use(granule)

    def drain(self, granule: int) -> int:
        return self.in_use(granule)

    def refill(self, granule: int) -> None:
        """Nothing was taken."""

    @property
    def held_back(self) -> int:
        return 0


OF_PAGES = ("map", "unmap")
OF_DEVICE = ("upload", "move_slots", "fill", "write", "fence", "after")
"""Methods that are watched; none calls another."""


class Watch:
    """Seconds by name since `take`."""

    def __init__(self) -> None:
        self._spent: Counter[str] = Counter()

    def over(self, owner: object, method: str) -> None:
        """From now on count the time of a method of `owner`."""
        timed = getattr(owner, method)

        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return timed(*arguments, **named)
            finally:
                self._spent[method] += time.perf_counter() - began

        setattr(owner, method, call)

    def take(self) -> dict[str, float]:
        """What was spent, and begin anew."""
        spent = {name: self._spent[name] for name in (*OF_PAGES, *OF_DEVICE)}
        self._spent.clear()
        return spent


class MovementEngine:
    """`step` runs one step for `pending` waiting blocks; times are seconds on the host's clock.

    host_seconds: of each step, for plan and memory; host_parts: of them, the plan and every method
    that is watched.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        torch.cuda.set_stream(torch.cuda.Stream())  # as vLLM does: graphs need one
        self.device = device = CudaDevice(setting.page_bytes)
        one = OneLayer(setting.model.layer)
        tier = RepeatedTier(one, setting.layers, device)
        reserve = reserve_pages(tier.sizes, device.page_bytes, setting.reserve_rows)
        start = np.full(tier.index.rows, LEVELS[-1], np.int32)
        self.worker = open_rank(
            device,
            tier,
            start,
            setting.memory,
            device.torch_device,
            reserve=reserve,
            pages_per_step=setting.pages_per_step,
        )
        weights = self.worker.mover.weights
        self.granule_blocks = device.page_bytes // setting.block
        granule_pages = setting.layers
        self.usable_granules = weights.pool.can_take() // granule_pages
        self.granules = weights.left_at(np.full(tier.index.rows, 3, np.int32)) // granule_pages
        self._back_kv()
        self.model = Model(setting, weights.tables, device)
        self.controller = self._controller(tier, start, reserve, granule_pages)
        self.parking = Parking(64, self.granule_blocks)
        self._flying: deque[tuple[torch.cuda.Event, WorkerReport]] = deque()
        self.host_seconds: list[float] = []
        self.host_parts: list[dict[str, float]] = []
        self._watch = Watch()
        for owner, methods in ((device.pages, OF_PAGES), (device, OF_DEVICE)):
            for method in methods:
                self._watch.over(owner, method)

    @property
    def block_bytes(self) -> int:
        return self.setting.block * self.setting.layers

    def _back_kv(self) -> None:
        weights, blocks = self.worker.mover.weights, self.granules * self.granule_blocks
        part = blocks * self.setting.block
        strides = [layer * part for layer in range(self.setting.layers)]
        layout = strided_granules(blocks, self.granule_blocks, self.setting.block, strides)
        nbytes = part * self.setting.layers
        self.worker.kv = KVRegion(weights.device, weights.pool, nbytes, layout)
        self.worker.apply(StepPlan(0, grow=tuple(range(self.usable_granules))))

    def _controller(
        self, tier: RepeatedTier, start: np.ndarray, reserve: int, granule_pages: int
    ) -> Controller:
        rng, experts = np.random.default_rng(0), tier.index.experts
        mass = np.full((tier.index.layers, experts), 1 / experts)
        damage = spread_damage(tier.index.layers, experts, LEVELS, rng)
        calibration = Calibration(LEVELS, damage, mass, None, True, ())
        page = self.device.page_bytes
        context = PlanContext.of(tier.index, tier.sizes, calibration, POLICY, page)
        return Controller(
            WeightPageTable(tier.index, tier.sizes, start),
            Planner(context),
            POLICY,
            GranuleLedger(
                self.granules * self.granule_blocks,
                self.granule_blocks,
                range(self.usable_granules),
            ),
            KVShape(self.block_bytes, granule_pages),
            page,
            config=DispatchConfig(
                rows_per_batch=self.setting.rows_per_batch, lowering_pages=reserve, eager=True
            ),
        )

    def free_blocks(self) -> int:
        return self.controller.granules.usable_blocks - 64

    def step(self, pending: int) -> float:
        """When the step before this one had finished and its report was heard."""
        began = time.perf_counter()
        demand = BlockDemand(self.free_blocks(), pending, min(pending, 8))
        plan = self.controller.step(demand, self.parking)
        planned = time.perf_counter() - began
        self.worker.apply(plan)
        self.host_seconds.append(time.perf_counter() - began)
        self.host_parts.append({"plan": planned, **self._watch.take()})
        self.model.launch()
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._flying.append((event, self.worker.report()))
        if len(self._flying) > 1:
            finished, report = self._flying.popleft()
            finished.synchronize()
            self.controller.hear(report, self.parking)
        return time.perf_counter()

    def settled(self) -> bool:
        """All bits back, nothing under way."""
        table = self.controller.table
        full = (table.committed_bits == table.sizes.planes).all()
        status = self.controller.status
        return bool(full and status is not None and not status.batches_under_way)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.device.close()
