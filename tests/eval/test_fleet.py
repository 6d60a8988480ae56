"""Seats beside each other are the models that the plain reference makes, one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from factory import ARCHS
from pagedweight.core.policies import Assignment
from pagedweight.eval.fleet import Fleet
from pagedweight.eval.reference import load_plain, load_quantized
from pagedweight.kernels.contract import LayerStats
from pagedweight.kernels.reference.kernel import add_stats
from quantized import make_quantized

CPU = torch.device("cpu")
TOKENS = torch.arange(24) % 96


def random_plan(checkpoint, seed):
    shape = (len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
    return np.random.default_rng(seed).choice(checkpoint.bits, shape).astype(np.int8)


def fleet_of(tmp_path, **source):
    checkpoint, _layers = make_quantized(tmp_path / "out", **source)
    model = load_plain(tmp_path / "out-source", torch.float32, CPU)
    return checkpoint, Fleet(checkpoint, model, "float32", "cpu")


@pytest.mark.parametrize("arch", ARCHS)
def test_each_seat_is_its_own_model(tmp_path, arch):
    layout = "fused" if arch.startswith("gemma4") else "per_expert"  # as transformers loads it
    checkpoint, fleet = fleet_of(tmp_path, arch=arch, layout=layout)
    plans = [random_plan(checkpoint, seed) for seed in (1, 2)]
    found = fleet.run(TOKENS, [Assignment(plans[0]), None, Assignment(plans[1])]).logits
    alone = [load_quantized(checkpoint, p, torch.float32, CPU).logits(TOKENS) for p in plans]
    source = load_plain(tmp_path / "out-source", torch.float32, CPU).logits(TOKENS)
    for seat, wanted in zip(found, (alone[0], source, alone[1]), strict=True):
        assert torch.allclose(seat, wanted, atol=2e-5)
    assert not torch.allclose(found[0], found[2], atol=1e-3)


def test_a_window_in_pieces_over_a_cache_is_the_window(tmp_path):
    checkpoint, fleet = fleet_of(tmp_path)
    seats = [None, Assignment(random_plan(checkpoint, 1))]
    whole = fleet.run(TOKENS, seats).logits
    cache = fleet.cache()
    pieces = [fleet.run(TOKENS[at : at + 8], seats, cache).logits for at in (0, 8, 16)]
    assert torch.allclose(torch.cat(pieces, dim=1), whole, atol=2e-5)


def test_signals_are_what_the_kernels_contract_counts(tmp_path):
    """Against `add_stats` on inputs caught at the first MoE layer of a plain model."""
    checkpoint, fleet = fleet_of(tmp_path)
    plan = random_plan(checkpoint, 3)
    found = fleet.run(TOKENS, [None, Assignment(plan)]).signals
    model = load_quantized(checkpoint, plan, torch.float32, CPU)
    module = model.model.model.layers[checkpoint.moe_layers[0]].mlp.experts
    caught = []
    module.register_forward_pre_hook(lambda _module, given: caught.append(given))
    model.logits(TOKENS)
    hidden, ids, routing = caught[0]
    stats = LayerStats.empty(checkpoint.shape.experts)
    for expert in range(checkpoint.shape.experts):
        token, choice = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = (hidden[token] @ module.gate_up_proj[expert].T).chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up
        add_stats(stats, expert, routing[token, choice], (hidden[token], inner))
    for name in ("mass", "tokens", "features"):
        counted = getattr(found[1], name)[0]
        assert np.allclose(counted, getattr(stats, name).detach().numpy(), rtol=1e-4), name
    assert (found[0].features[0] != found[1].features[0]).any()  # down's inputs differ with bits


def test_two_levels_are_read_by_the_share_of_tokens(tmp_path):
    checkpoint, fleet = fleet_of(tmp_path)
    shape = (len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
    low, high = np.full(shape, 2, np.int8), np.full(shape, 6, np.int8)
    seats = [Assignment(low, high, share) for share in (0.0, 0.5, 1.0)]
    mixed = fleet.run(TOKENS, [*seats, Assignment(low), Assignment(high)]).logits
    assert torch.allclose(mixed[0], mixed[3], atol=1e-5)
    assert torch.allclose(mixed[2], mixed[4], atol=1e-5)
    for end in (0, 2):
        assert not torch.allclose(mixed[1], mixed[end], atol=1e-3)
