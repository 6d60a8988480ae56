"""A rank on a real GPU: bits come and go while steps run, and every byte is what the host has.

Steps are kernel calls that nobody waits for; their outputs are compared some time later with what
the host's arrays say for the bits committed at their launch. Retired planes and granules given back
are poisoned: a step that read them late would compute NaN.
"""

import numpy as np
import pytest
import torch
from ranks import Driver, Expected, RandomTier, rank_of

from pagedweight.memory.interface import POISON
from pagedweight.memory.pinned_tier import PinnedTier
from pagedweight.runtime.integrity import check_worker
from pagedweight.runtime.messages import Batch, Stage, StepPlan

EXPERTS, LAYERS, TOKENS = 16, 3, 2
TOGETHER = 50
"""Steps whose outputs are compared together: only then does anybody wait for the GPU."""


def prepared_kernel(device):
    from pagedweight.kernels.cuda.kernel import CudaKernel

    made = CudaKernel()
    made.prepare(device.torch_device, torch.bfloat16, torch.bfloat16, EXPERTS)
    return made


@pytest.fixture
def kernel(device):
    return prepared_kernel(device)


class Model:
    """Calls of one layer's kernel with two chosen experts, written into `out`."""

    def __init__(self, kernel, rank, x):
        self.kernel, self.rank, self.x = kernel, rank, x
        self.weights = torch.full((len(x), 2), 0.5, device=x.device)
        self.ids = torch.zeros((len(x), 2), dtype=torch.int32, device=x.device)
        self.out = torch.zeros_like(x)

    def __call__(self, layer):
        self.kernel(
            self.x,
            self.weights,
            self.ids,
            self.rank.tier.shape,
            self.rank.weights.tables[layer],
            torch.bfloat16,
            "silu",
            self.out,
        )


def gpu_rank(device, hidden=256, intermediate=192, pages=160, bits=4):
    """KV granules of one 2 MiB page in each of two layers."""
    tier = RandomTier(LAYERS, EXPERTS, hidden, intermediate)
    host = PinnedTier(tier, device.host_memory)
    return rank_of(device, pages, 14, bits, tier=tier, host=host, at="cuda", block=1 << 20)


def model_of(kernel, rank):
    x = torch.randn((TOKENS, 256), generator=torch.Generator().manual_seed(1))
    x = x.to(torch.bfloat16)
    return Model(kernel, rank, x.cuda()), Expected(rank.tier, x.float())


def wrong(found, expected):
    """Relative error; above 2e-2 is another plane or poison, below is bfloat16."""
    found = found.cpu().float()
    return not (found - expected).norm() <= 2e-2 * expected.norm()


def settle(rank, step, **orders):
    """Apply `orders`, then let everything finish."""
    rank.worker.apply(StepPlan(step, **orders))
    for _ in range(3):
        torch.cuda.synchronize()
        step += 1
        open_ = [s.number for s in rank.mover.statuses() if s.stage is Stage.READY]
        rank.worker.apply(StepPlan(step, commit=tuple(open_)))
    return step + 1


def test_down_to_two_bits_and_up_to_six_gives_the_same_bytes(device):
    rank = gpu_rank(device, 1024, 480, bits=6)
    rows = tuple(range(rank.tier.index.rows))
    before, step = rank.pool.free, 1
    check_worker(rank.worker, contents=True)
    down = Batch(1, True, rows, (2,) * len(rows))
    step = settle(rank, step, prepare=(down,))
    assert (rank.table.committed_bits == 2).all()
    assert rank.pool.free > before
    check_worker(rank.worker, contents=True)
    up = Batch(2, False, rows, (6,) * len(rows))
    step = settle(rank, step, prepare=(up,))
    assert (rank.table.committed_bits == 6).all()
    assert [s.stage for s in rank.mover.statuses()] == [Stage.DONE, Stage.DONE]
    check_worker(rank.worker, contents=True)
    assert rank.pool.free == before


def test_retired_planes_are_poison_and_their_pages_serve_kv(device):
    rank = gpu_rank(device, 1024, 480, bits=6)
    rows = tuple(range(rank.tier.index.rows))
    while rank.pool.can_take():
        rank.pool.take(1, "somebody")
    rank.worker.apply(StepPlan(1, grow=tuple(range(8))))
    assert rank.worker.kv.backed == []
    step = settle(rank, 2, prepare=(Batch(1, True, rows, (2,) * len(rows)),))
    arena = rank.weights.arenas[0]
    room = rank.pool.page_bytes - arena.end * arena.slot_bytes % rank.pool.page_bytes
    tail = device.read(arena.address(arena.end), room)
    assert (tail == POISON).all()
    rank.worker.apply(StepPlan(step, grow=tuple(range(8))))
    assert len(rank.worker.kv.backed) == 8
    assert rank.worker.kv.tensor().eq(0).all()


def random_steps(device, kernel, more):
    """Random transitions under running steps while `more(number)`. Every step's output is compared,
    TOGETHER at a time so that the time for it counts too, and every byte in the end. Returns the
    worker's counters."""
    rank = gpu_rank(device)
    model, expected = model_of(kernel, rank)
    driver, outputs, number = Driver(rank, 3), [], 0
    while more(number):
        rank.worker.apply(driver.plan())
        chosen = driver.rng.choice(EXPERTS, 2, replace=False).tolist()
        bits, layer = rank.table.committed_bits.copy(), number % LAYERS
        device.write(model.ids.data_ptr(), np.tile(np.array(chosen, np.int32), TOKENS))
        if number % 7 == 0:
            torch.cuda._sleep(3_000_000)  # the GPU lags a few steps behind
        model(layer)
        outputs.append((number, layer, chosen, bits, model.out.clone()))
        number += 1
        if len(outputs) == TOGETHER:
            compare(outputs, expected)
            check_worker(rank.worker)
    compare(outputs, expected)
    assert rank.worker.counters.rolled_back == 0
    torch.cuda.synchronize()
    rank.worker.apply(StepPlan(driver.step + 1))
    check_worker(rank.worker, contents=True)
    return rank.worker.counters


def compare(outputs, expected):
    """(step, layer, experts, bits, output) each; forgets them."""
    bad = [
        number
        for number, layer, chosen, bits, out in outputs
        if wrong(out, expected.output(layer, bits, chosen))
    ]
    assert not bad, f"steps {bad[:8]} computed with other planes than were committed"
    outputs.clear()


def test_random_transitions_under_running_steps(device, kernel):
    counted = random_steps(device, kernel, lambda number: number < 200)
    assert min(counted.rows_lowered, counted.rows_raised, counted.granules_grown) > 100


def test_a_graph_captured_at_six_bits_computes_at_three_after_a_commit(device, kernel):
    rank = gpu_rank(device, bits=6)
    model, expected = model_of(kernel, rank)
    chosen = [3, 9]
    device.write(model.ids.data_ptr(), np.tile(np.array(chosen, np.int32), TOKENS))
    model(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(1)
    graph.replay()
    assert not wrong(model.out, expected.output(1, rank.table.committed_bits, chosen))
    at_six = model.out.clone()
    rows = tuple(range(rank.tier.index.rows))
    settle(rank, 1, prepare=(Batch(1, True, rows, (3,) * len(rows)),))
    assert rank.worker.counters.compacted_bytes > 0
    model.out.zero_()
    graph.replay()
    assert not wrong(model.out, expected.output(1, rank.table.committed_bits, chosen))
    assert not torch.equal(model.out, at_six)
