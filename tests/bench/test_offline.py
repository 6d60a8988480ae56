"""The offline benchmark: a source that the real commands take, times that grow as they should."""

from __future__ import annotations

import json

import pytest
import torch
from test_synthetic_checkpoint import small

from pagedweight.bench import offline
from pagedweight.bench.offline import Growth, measure, random_tokens
from pagedweight.bench.source import make_source
from pagedweight.core.geometry import KINDS
from pagedweight.errors import UserError


@pytest.mark.parametrize("name", ("qwen1.5-moe", "mixtral"))
def test_the_source_is_whole_and_of_the_stated_scale(name, tmp_path):
    source = make_source(small(name), tmp_path / "source", "cpu", seed=0)
    source.check_values()
    for kind in KINDS:
        weights = source.expert(1, 2, kind).float()
        assert 0.7 < float(weights.std()) * weights.shape[1] ** 0.5 < 1.6
    assert not torch.equal(source.expert(0, 0, "down"), source.expert(1, 0, "down"))
    with pytest.raises(UserError, match="not an empty folder"):
        make_source(small(name), tmp_path / "source", "cpu", seed=0)


@pytest.mark.parametrize("name", ("qwen1.5-moe", "mixtral"))
def test_a_row_has_every_stage_and_grows_with_the_layers(name, tmp_path):
    config = small(name)
    text = random_tokens(config["vocab_size"], 8, 32, seed=0)
    whole = config | {"num_hidden_layers": 6}
    half, row = measure(config, whole, tmp_path, text, "cpu", "compensated")
    assert set(half["measured"]) == {"quantize"}
    assert half["whole_model"]["sum_s"] == half["whole_model"]["quantize_s"]
    assert row["moe_layers_measured"] == 2
    assert row["moe_layers_of_model"] == 6
    quantize, calibrate = row["measured"]["quantize"], row["measured"]["calibrate"]
    assert {"check", "copy", "layers"} <= set(quantize["seconds"])
    assert {"load", "forward", "head", "backward", "heads"} <= set(calibrate["seconds"])
    assert quantize["blocks"] == 2 * 4 * 2
    assert quantize["blocks_kept_plain"] is not None
    for name in ("quantize", "calibrate"):
        seconds = row["measured"][name]["seconds"]
        layers = sum(seconds.get(key, 0) for key in ("layers", "forward", "backward"))
        assert row["whole_model"][f"{name}_s"] >= round(3 * layers, 1) - 0.2
    assert not list(tmp_path.iterdir())
    json.dumps(row)


def test_only_what_goes_with_the_model_grows():
    growth = Growth(layers=10, total=5, plain=2)
    seconds = {"open": 1, "check": 1, "copy": 1, "layers": 1, "head": 1}
    assert offline._grown(seconds, growth) == 1 + 5 + 2 + 10 + 1


def test_tokens_are_in_the_vocabulary_and_frequent_ones_come_first():
    tokens = random_tokens(1000, 4, 500, seed=1).tokens
    assert tokens.min() >= 0
    assert tokens.max() < 1000
    assert (tokens < 31).float().mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has what is asked for")
def test_a_missing_gpu_is_one_sentence_before_any_work(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        offline.main(["mixtral", "--folder", str(tmp_path / "source"), "-o", str(tmp_path / "o")])
    assert end.value.code == 2
    assert "finds no CUDA device; use --device cpu" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"rows": [', "cannot be read"),
        ("\x00\xff", "cannot be read"),
        ('{"rows": [3]}', "has no rows of this benchmark"),
        ("[]", "has no rows of this benchmark"),
    ],
)
def test_a_result_file_that_is_none_is_left_alone_before_any_work(tmp_path, capsys, content, said):
    out = tmp_path / "offline.json"
    out.write_bytes(content.encode("latin-1"))
    asked = ["mixtral", "--device", "cpu", "--folder", str(tmp_path / "source"), "-o", str(out)]
    with pytest.raises(SystemExit) as end:
        offline.main(asked)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert said in message
    assert "move it away" in message
    assert len(message.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["offline.json"]
    assert out.read_bytes() == content.encode("latin-1")
