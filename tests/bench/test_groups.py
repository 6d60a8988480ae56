"""`bench groups`: what is timed at which precisions, on fakes of the GPU's part."""

from __future__ import annotations

import pytest
import torch

from pagedweight.bench import groups
from pagedweight.bench.decode import plan_bytes
from pagedweight.bench.layers import SHAPES
from pagedweight.kernels.cuda import decode
from pagedweight.kernels.cuda.shapes import Device

H200 = Device(0, (9, 0), 132, 232448)


@pytest.mark.parametrize("rare", [2, 8])
def test_one_block_in_so_many_is_a_bit_off(rare):
    model = SHAPES["gemma-4"]
    layers = groups.layer_bits(f"4+{rare}", model)
    bits = torch.stack(layers)
    assert bits.shape == (model.layers, model.layer.experts, 2)
    assert bits.dtype == torch.int32
    assert float((bits != 4).double().mean()) == pytest.approx(1 / rare, rel=0.1)
    assert set(bits.unique().tolist()) == {3, 4, 5}
    assert not torch.equal(layers[0], layers[1])
    assert torch.equal(torch.stack(groups.layer_bits(f"4+{rare}", model)), bits)


def test_the_mix_is_that_of_bench_decode_and_uniform_is_uniform():
    model = SHAPES["mixtral"]
    mix = torch.stack(groups.layer_bits("mix4", model)).numpy()
    uniform = torch.stack(groups.layer_bits("4", model)).numpy()
    assert plan_bytes(mix, model.layer) <= plan_bytes(uniform, model.layer)
    assert (uniform == 4).all()
    assert len(set(mix.flatten())) > 2


def test_pairs_divide_the_warps_of_the_thread_block():
    assert groups.pairs_for(SHAPES["mixtral"], 32, H200) == list(groups.PAIRS)
    twelve = groups.pairs_for(SHAPES["mixtral"], 64, H200)
    assert twelve == [pair for pair in groups.PAIRS if max(pair) < 3]


def test_every_pair_is_forced_in_turn_and_the_choice_is_our_own_again(monkeypatch):
    seen, own = [], decode.group_table
    monkeypatch.setattr(groups, "token_sets", lambda *_: [None])
    monkeypatch.setattr(groups, "float64_output", lambda *_: None)
    monkeypatch.setattr(groups, "describe", lambda _: H200)
    monkeypatch.setattr(groups, "relative_error", lambda *_: 0.001 * (1 + len(seen)))

    def timed(*_):
        forced = None if decode.group_table is own else decode.group_table(1, 2)
        seen.append(forced and forced[0][1])
        return len(seen)

    monkeypatch.setattr(groups, "time_ours", timed)
    row = groups.measure(None, SHAPES["qwen1.5-moe"], [None], 4, "uniform")
    assert seen == [None, *groups.PAIRS]
    assert decode.group_table is own
    keys = ["auto", *(f"{a}{b}" for a, b in groups.PAIRS)]
    assert row == {"us": dict(zip(keys, range(1, 11), strict=True)), "relative_error": 0.01}
