"""transformers' model holds exactly the experts that the plan asks for, in every family."""

import numpy as np
import pytest
import torch

from factory import ARCHS
from pagedweight.checkpoint.plan import uniform_plan
from pagedweight.core.geometry import KINDS
from pagedweight.errors import CheckpointError
from pagedweight.eval.reference import load_plain, load_quantized
from quantized import make_quantized

CPU = torch.device("cpu")
TOKENS = torch.arange(24) % 96


@pytest.mark.parametrize("arch", ARCHS)
def test_experts_are_the_plans_and_the_rest_is_the_sources(tmp_path, arch):
    layout = "fused" if arch.startswith("gemma4") else "per_expert"  # as transformers loads it
    checkpoint, layers = make_quantized(tmp_path / "out", arch=arch, layout=layout)
    shape = (len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
    plan = np.random.default_rng(1).choice(checkpoint.bits, shape).astype(np.int8)
    model = load_quantized(checkpoint, plan, torch.float32, CPU)
    source = load_plain(tmp_path / "out-source", torch.float32, CPU)
    dtype = getattr(torch, checkpoint.table_dtype)
    theirs = dict(source.model.named_parameters())
    replaced = 0
    for name, weight in model.model.named_parameters():
        end = name.rsplit(".", 1)[-1]
        if end not in ("gate_up_proj", "down_proj") or weight.ndim != 3:
            assert torch.equal(weight, theirs[name]), name
            continue
        kind = ("gate_up_proj", "down_proj").index(end)
        position = checkpoint.moe_layers.index(int(name.split("layers.")[1].split(".")[0]))
        for expert in range(shape[1]):
            bits = int(plan[position, expert, kind])
            wanted = layers[position].weights(expert, KINDS[kind], bits, dtype)
            assert torch.equal(weight[expert], wanted.float()), (name, expert)
            replaced += 1
    assert replaced == plan.size
    logits = model.logits(TOKENS)
    assert logits.shape == (24, 96)
    assert not torch.allclose(logits, source.logits(TOKENS), atol=1e-3)
    theirs_after = source.model.load_state_dict(model.model.state_dict())
    assert not theirs_after.missing_keys
    assert torch.equal(source.logits(TOKENS), logits)


def test_a_window_needs_no_padding_and_repeats(tmp_path):
    checkpoint, _layers = make_quantized(tmp_path / "out", dense=(1,))
    model = load_quantized(checkpoint, uniform_plan(checkpoint, 4), torch.float32, CPU)
    assert torch.equal(model.logits(TOKENS), model.logits(TOKENS))
    causal = model.logits(TOKENS[:10])
    assert torch.allclose(causal, model.logits(TOKENS)[:10], atol=1e-5)


def test_a_model_with_missing_tensors_is_refused(tmp_path):
    make_quantized(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"lacks tensors of the model: .*gate_up_proj"):
        load_plain(tmp_path / "out", torch.float32, CPU)
