"""Ranks over a real checkpoint: cuts of a layer, and the compiled kernel among transitions."""

from functools import lru_cache

import numpy as np
import pytest
import torch

from pagedweight.core.geometry import KINDS, part_columns
from pagedweight.errors import UserError
from pagedweight.kernels.contract import LayerStats
from pagedweight.kernels.cpu.kernel import CpuKernel
from pagedweight.kernels.reference.kernel import ReferenceKernel, read_block
from pagedweight.memory.host import HostDevice
from pagedweight.memory.host_tier import CheckpointTier
from pagedweight.runtime.integrity import check_worker
from pagedweight.runtime.messages import Batch, Stage, StepPlan
from pagedweight.runtime.signals import take_signals
from pagedweight.runtime.startup import open_rank, reserve_pages
from quantized import make_quantized

MIB = 1 << 20


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    path = tmp_path_factory.mktemp("rank") / "out"
    return make_quantized(path, hidden=96, intermediate=150, experts=3, layers=3, dense=(0,))


def random_bits(tier, seed=0):
    return np.random.default_rng(seed).integers(2, 7, tier.index.rows).astype(np.int32)


@pytest.mark.parametrize("rank, ranks", [(0, 1), (0, 2), (1, 2), (0, 3), (2, 3)])
def test_a_rank_reads_its_part_of_every_block(quantized, rank, ranks):
    checkpoint, layers = quantized
    tier = CheckpointTier(checkpoint, experts=(2, 0), rank=rank, ranks=ranks)
    device = HostDevice()
    bits = random_bits(tier)
    worker = open_rank(device, tier, bits, 8 * MIB)
    start, stop = part_columns(150, rank, ranks)
    for position, layer in enumerate(layers):
        for local, expert in enumerate((2, 0)):
            for kind, name in enumerate(KINDS):
                level = int(bits[tier.index.row(position, local, kind)])
                whole = layer.weights(expert, name, level, torch.bfloat16)
                table = worker.mover.weights.tables[position]
                found = read_block(table, tier.shape, local, kind, torch.bfloat16, torch.bfloat16)
                halves = whole.view(2, -1, whole.shape[1])[:, start:stop]
                part = whole[:, start:stop] if kind else halves.reshape(-1, whole.shape[1])
                assert torch.equal(found, part)
    check_worker(worker, contents=True)
    device.close()


def test_the_compiled_kernel_decodes_among_transitions(quantized):
    """Statistics too are those of the layer that was run, and are taken once."""
    checkpoint, layers = quantized
    tier, device, rng = CheckpointTier(checkpoint), HostDevice(), np.random.default_rng(0)
    worker = open_rank(device, tier, random_bits(tier), 8 * MIB, poison=True)
    kernel, table = CpuKernel(), worker.mover.table
    stats = [LayerStats.empty(3) for _ in layers]
    x = torch.randn((5, 96), generator=torch.Generator().manual_seed(0)).bfloat16()
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]], dtype=torch.int32)
    route = torch.full((5, 2), 0.5)

    def output(made, stats=None, layer=0):
        out = torch.empty_like(x)
        of = worker.mover.weights.tables[layer]
        made(x, route, ids, tier.shape, of, torch.bfloat16, "silu", out, stats)
        return out

    expected = lru_cache(maxsize=None)(
        lambda layer, bits: dense(layers[layer], np.array(bits).reshape(3, 2), x, ids)
    )
    for step in range(1, 120):
        status = worker.report().batches
        ready = tuple(s.number for s in status if s.stage is Stage.READY)
        q, lowers = table.committed_bits, bool(step % 2)
        rows = [r for r in range(12) if (q[r] > 2 if lowers else q[r] < 6)]
        rows = [r for r in rows if r not in worker.mover.busy_rows]
        rows = rng.permutation(rows)[:4].tolist()
        bits = tuple(
            int(rng.integers(2, q[r]) if lowers else rng.integers(q[r], 6) + 1) for r in rows
        )
        prepare = (Batch(step, lowers, tuple(rows), bits),) if rows else ()
        worker.apply(StepPlan(step, commit=ready, prepare=prepare, oldest=step - 20))
        layer = step % 2
        now = tuple(table.committed_bits.reshape(tier.index.shape)[layer].ravel().tolist())
        found = output(kernel, stats[layer], layer)
        assert torch.allclose(found.float(), expected(layer, now), rtol=0.02, atol=0.02)
    assert worker.counters.rows_lowered > 40
    assert worker.counters.rows_raised > 40
    check_worker(worker, contents=not worker.mover.pieces_in(Stage.COPYING))
    signals = take_signals(stats)
    assert signals.tokens.sum(axis=1).tolist() == [59 * 10, 60 * 10]
    assert signals.mass.shape == (2, 3)
    assert signals.features.min() > 0
    assert not take_signals(stats).tokens.any()
    device.close()


def dense(layer, bits, x, ids):
    """The layer's output from the codes it was made of; float32, weights in bfloat16."""
    total = torch.zeros(x.shape)
    for token, chosen in enumerate(ids.tolist()):
        for expert in chosen:
            gate_up = layer.weights(expert, "gate_up", int(bits[expert, 0]), torch.bfloat16)
            down = layer.weights(expert, "down", int(bits[expert, 1]), torch.bfloat16)
            gate, up = (gate_up.float() @ x[token].float()).chunk(2)
            hidden = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            total[token] += 0.5 * (down.float() @ hidden)
    return total


def test_both_kernels_read_the_same_memory(quantized):
    checkpoint, _ = quantized
    tier, device = CheckpointTier(checkpoint), HostDevice()
    worker = open_rank(device, tier, random_bits(tier, 4), 8 * MIB)
    x = torch.randn((4, 96), generator=torch.Generator().manual_seed(2))
    ids, route = torch.tensor([[0], [1], [2], [1]], dtype=torch.int32), torch.ones(4, 1)
    outs = [torch.empty_like(x) for _ in range(2)]
    for kernel, out in zip((CpuKernel(), ReferenceKernel()), outs, strict=True):
        table = worker.mover.weights.tables[1]
        kernel(x, route, ids, tier.shape, table, torch.bfloat16, "silu", out)
    assert torch.allclose(*outs, rtol=1e-4, atol=1e-5)
    device.close()


def test_a_budget_below_the_reserve_is_refused_with_the_numbers(quantized):
    checkpoint, _ = quantized
    tier = CheckpointTier(checkpoint)
    bits = random_bits(tier)
    reserve = reserve_pages(tier.sizes, 64 << 10)
    with pytest.raises(UserError, match=rf"is 2 pages of 65536; {reserve} of them are a reserve"):
        open_rank(HostDevice(), tier, bits, 2 * (64 << 10))
    with pytest.raises(UserError, match=r"weights of this plan need \d+ pages .* leaves 1:"):
        open_rank(HostDevice(), tier, bits, (reserve + 1) * (64 << 10))
