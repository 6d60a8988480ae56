"""A small rank to test with: random planes and tables on the host, memory on any device."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from pagedweight.core.geometry import TILE_WORDS, LayerShape
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.kernels.reference.bits import dequantize_block
from pagedweight.kernels.reference.kernel import ReferenceKernel, activate
from pagedweight.memory.kv_region import KVRegion, strided_granules
from pagedweight.memory.pool import PagePool
from pagedweight.runtime.messages import Batch, Stage, StepPlan
from pagedweight.runtime.mover import Mover
from pagedweight.runtime.weights import WeightMemory
from pagedweight.runtime.worker import MemoryWorker

LEVELS = (2, 3, 4, 5, 6)


class RandomTier:
    """A host tier of random codes and centroids, like a checkpoint's."""

    def __init__(self, layers=2, experts=3, hidden=64, intermediate=40, seed=0):
        rng = np.random.default_rng(seed)
        self.index = BlockIndex(layers, experts)
        self.shape = LayerShape(experts, hidden, intermediate)
        self.sizes = SizeTable.of(self.shape, LEVELS)
        self.words, self.centroids = [], []
        for row in range(self.index.rows):
            block = self.shape.blocks[row % 2]
            shape = (LEVELS[-1], block.row_tiles, block.col_tiles, TILE_WORDS)
            self.words.append(rng.integers(0, 2**32, shape, dtype=np.uint32))
            self.centroids.append(
                {
                    bits: torch.from_numpy(
                        rng.standard_normal((block.padded_rows, 1 << bits), np.float32)
                    ).to(torch.bfloat16)
                    for bits in LEVELS
                }
            )

    def plane(self, row, plane):
        return self.words[row][plane].view(np.uint8)

    def table(self, row, bits):
        return self.centroids[row][bits].view(torch.int16).numpy().view(np.uint8)

    def dense(self, row, bits):
        """float32 [N, K]: the row's weights at `bits`, straight from the host's arrays."""
        words = torch.from_numpy(self.words[row][:bits].view(np.int32))
        block = self.shape.blocks[row % 2]
        return dequantize_block(words, self.centroids[row][bits], block, torch.float32)


class DealtTier:
    """Some layers and experts of a `RandomTier`, as a rank that holds them numbers them."""

    def __init__(self, whole, holding):
        self._whole, self._rows = whole, holding.rows(whole.index).tolist()
        self.index = holding.index
        self.shape = LayerShape(self.index.experts, whole.shape.hidden, whole.shape.intermediate)
        self.sizes = SizeTable.of(self.shape, LEVELS)

    def plane(self, row, plane):
        return self._whole.plane(self._rows[row], plane)

    def table(self, row, bits):
        return self._whole.table(self._rows[row], bits)


@dataclass
class Rank:
    tier: RandomTier
    device: object
    pool: PagePool
    weights: WeightMemory
    table: WeightPageTable
    mover: Mover
    worker: MemoryWorker


def rank_of(
    device,
    pages=400,
    reserve=8,
    bits=4,
    poison=True,
    granules=8,
    tier=None,
    host=None,
    at="cpu",
    block=3000,
    layers=2,
):
    """A loaded rank; KV has `granules` granules of two blocks of `block` bytes in `layers` layers.

    host: the host tier if it is not `tier` itself; at: where kernels look for their tables.
    """
    tier = tier or RandomTier()
    pool = PagePool(device, pages, reserve)
    weights = WeightMemory(device, pool, host or tier, at, poison=poison)
    start = np.full(tier.index.rows, bits, np.int32) if np.isscalar(bits) else bits
    weights.load(start)
    table = WeightPageTable(tier.index, tier.sizes, start)
    mover = Mover(weights, table)
    starts = [layer * 2 * granules * block for layer in range(layers)]
    layout = strided_granules(2 * granules, 2, block, starts)
    kv = KVRegion(
        device, pool, 2 * layers * granules * block, layout, tolerant=False, poison=poison
    )
    return Rank(tier, device, pool, weights, table, mover, MemoryWorker(mover, kv))


def kernel_output(rank, layer, x, experts=None):
    """What a kernel computes through layer `layer`'s table now: `experts`, equal weights."""
    experts = list(range(rank.tier.shape.experts)) if experts is None else experts
    ids = torch.tensor(experts, dtype=torch.int32).expand(len(x), len(experts)).contiguous()
    weights = torch.full(ids.shape, 1 / len(experts))
    out = torch.empty_like(x)
    table = rank.weights.tables[layer]
    ReferenceKernel()(x, weights, ids, rank.tier.shape, table, torch.bfloat16, "silu", out)
    return out


class Expected:
    """Outputs from the host's arrays, with no page, slot or address involved.

    Each expert's part is computed once for each pair of bits.
    """

    def __init__(self, tier, x):
        self.tier, self.x = tier, x
        self.part = lru_cache(maxsize=None)(self._part)

    def _part(self, row, gate_up, down):
        gate, up = (self.x @ self.tier.dense(row, gate_up).T).chunk(2, dim=1)
        return (activate(gate, "silu") * up) @ self.tier.dense(row + 1, down).T

    def output(self, layer, bits, experts=None):
        experts = range(self.tier.shape.experts) if experts is None else experts
        rows = [self.tier.index.row(layer, expert, 0) for expert in experts]
        parts = [self.part(row, int(bits[row]), int(bits[row + 1])) for row in rows]
        return torch.stack(parts).mean(0)


def same(found, expected):
    """Equal up to the order of sums; poison would be NaN, a wrong plane another number."""
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-3)


class Driver:
    """Makes random plans: batches both ways, late commits, aborts, KV back and forth."""

    def __init__(self, rank, seed, granules=8):
        self.rank, self.rng, self.granules = rank, np.random.default_rng(seed), granules
        self.step = self.number = 0

    def plan(self):
        rng, worker = self.rng, self.rank.worker
        stages = {s.number: s.stage for s in worker.mover.statuses()}
        ready = [n for n, stage in stages.items() if stage is Stage.READY and rng.random() < 0.9]
        open_ = [n for n, stage in stages.items() if stage in (Stage.COPYING, Stage.READY)]
        backed = worker.kv.backed
        self.step += 1
        return StepPlan(
            self.step,
            abort=tuple(n for n in open_ if rng.random() < 0.03),
            commit=tuple(ready),
            shrink=tuple(g for g in backed if rng.random() < 0.2),
            prepare=tuple(b for lowers in (True, False) if (b := self.batch(lowers))),
            grow=tuple(g for g in range(self.granules) if rng.random() < 0.2),
            oldest=self.number,
        )

    def batch(self, lowers):
        rng, q = self.rng, self.rank.table.committed_bits
        busy = self.rank.mover.busy_rows
        room = (q > LEVELS[0]) if lowers else (q < LEVELS[-1])
        free = [row for row in np.flatnonzero(room).tolist() if row not in busy]
        if not free:
            return None
        rows = rng.choice(free, min(len(free), int(rng.integers(1, 40))), replace=False).tolist()
        bits = [
            int(rng.integers(LEVELS[0], q[row]) if lowers else rng.integers(q[row], 6) + 1)
            for row in rows
        ]
        self.number += 1
        return Batch(self.number, lowers, tuple(rows), tuple(bits))
