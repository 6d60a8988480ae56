"""Checkpoints of random weights: the real reader takes them, and so do transformers' names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedweight.bench.models import MODELS, model_config
from pagedweight.bench.synthetic import main, make_checkpoint, spread_damage
from pagedweight.checkpoint.names import architecture_of
from pagedweight.checkpoint.shards import open_shards
from pagedweight.errors import UserError

EXPERTS = {
    "qwen1.5-moe": (60, 2048, 1408),
    "mixtral": (8, 4096, 14336),
    "gemma-4": (128, 2816, 704),
}


def small(name: str) -> dict:
    """The model's config with everything but its structure made small."""
    config = model_config(name, 2)
    sizes = {"hidden_size": 64, "vocab_size": 96, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "bos_token_id": 0}
    sizes |= {key: 64 for key in config if key.endswith("expert_intermediate_size")}
    sizes |= {key: 64 for key in config if key == "moe_intermediate_size"}
    sizes |= {key: 4 for key in config if key in ("num_experts", "num_local_experts")}
    sizes |= {key: 2 for key in config if key in ("num_experts_per_tok", "top_k_experts")}
    sizes |= {key: 32 for key in config if key in ("head_dim", "global_head_dim")}
    return config | sizes | {"eos_token_id": 0}


@pytest.mark.parametrize("name", MODELS)
def test_full_size_is_the_published_one(name):
    facts = architecture_of(config := model_config(name)).facts(config)
    shape = facts.shape
    assert (shape.experts, shape.hidden, shape.intermediate) == EXPERTS[name]
    assert len(facts.moe_layers) == {"qwen1.5-moe": 24, "mixtral": 32, "gemma-4": 30}[name]


@pytest.mark.parametrize("name", MODELS)
def test_the_reader_takes_it(name, tmp_path):
    made = make_checkpoint(small(name), tmp_path / "out", (2, 3, 4), "cpu")
    assert made.verify() == []
    assert made.bits == (2, 3, 4)
    assert len(made.moe_layers) == 2
    table = made.layer(1).tables["down"][3]
    centroids = torch.from_numpy(table.view(np.int16).copy()).view(torch.bfloat16).float()
    assert (centroids.diff(dim=-1) >= 0).all()
    weights = made.dequantize(1, 0, "gate_up", 4)
    assert 0.5 < float(weights.std()) * 64**0.5 < 1.5
    assert not np.array_equal(made.layer(0).planes["down"], made.layer(1).planes["down"])
    assert made.calibration().mass.sum() == pytest.approx(2)
    names = set(open_shards(tmp_path / "out"))
    assert not [n for n in names if architecture_of(small(name)).parse(n)]
    assert "model.embed_tokens.weight" in names
    assert ("lm_head.weight" in names) == (name != "gemma-4")


def test_damage_is_spread_as_in_a_trained_model():
    """The numbers are those measured on lab-moe (bench/synthetic.py); drawn over 48 layers."""
    levels = (2, 3, 4, 6)
    found = np.log(spread_damage(48, 60, levels, np.random.default_rng(1)))
    assert found.shape == (48, 60, 2, 4)
    assert (np.diff(found) < 0).all(), "a bit more never harms more"
    steps = -np.diff(found).mean((0, 1, 2)) / np.diff(levels)
    assert np.exp(steps) == pytest.approx([4.5] * 3, rel=0.02)
    within = found - found.mean(1, keepdims=True)
    assert within.std() == pytest.approx(1.25, abs=0.08)
    assert found.mean((1, 3)).std() == pytest.approx(0.46, abs=0.15)
    assert np.corrcoef(within[:, :, 0, 0].ravel(), within[:, :, 1, 0].ravel())[0, 1] > 0.95


def test_a_seed_gives_the_same_calibration(tmp_path):
    made = [
        make_checkpoint(small("mixtral"), tmp_path / str(n), (2, 3, 4), "cpu", seed).calibration()
        for n, seed in enumerate((3, 3, 4))
    ]
    assert np.array_equal(made[0].damage(), made[1].damage())
    assert not np.allclose(made[0].damage(), made[2].damage())
    assert (np.diff(made[0].damage()) < 0).all()


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(UserError, match="not an empty folder"):
        make_checkpoint(small("mixtral"), tmp_path, (2, 3), "cpu")


def test_sizes_that_need_padding_are_refused(tmp_path):
    with pytest.raises(UserError, match="whole tiles"):
        make_checkpoint(small("mixtral") | {"intermediate_size": 72}, tmp_path, (2, 3), "cpu")


def test_the_command_says_what_it_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pagedweight.bench.synthetic.model_config", lambda *_: small("mixtral"))
    main(["mixtral", str(tmp_path / "out"), "--bits", "2", "3"])
    assert "2 MoE layers" in capsys.readouterr().out
