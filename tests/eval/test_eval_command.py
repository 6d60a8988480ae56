"""`pagedweight eval` as a user runs it, and both engines beside each other."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from pagedweight.checkpoint.plan import save_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.cli.main import main

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
SHORT = ("--text", TEXT, "--window", 128, "--windows", 3)
"""Three windows of the licence's text."""


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


def report_of(capfd, *args):
    assert run("eval", *args, "--json") == 0
    return json.loads(capfd.readouterr().out)


def test_more_bits_are_closer_to_the_model(tiny_quantized, tiny_moe, capfd):
    kls = []
    for bits in (2, 5):
        found = report_of(capfd, tiny_quantized, *SHORT, "--bits", bits, "--model", tiny_moe)
        kl, gap = found["kl"], found["nll_difference"]["mean"]
        assert 0 < kl["low"] <= kl["mean"] <= kl["high"]
        assert found["precision"]["mean_bits"] == bits
        assert found["predictions"] == 3 * 127
        ratio = found["perplexity"]["mean"] / found["model"]["perplexity"]["mean"]
        assert np.log(ratio) == pytest.approx(gap, abs=1e-9)
        kls.append(kl["mean"])
    assert kls[0] > 10 * kls[1]


def test_a_plan_file_and_its_bytes(tiny_quantized, tmp_path, capfd):
    checkpoint = Checkpoint.open(tiny_quantized)
    plan = np.full((len(checkpoint.moe_layers), checkpoint.shape.experts, 2), 3, np.int8)
    plan[0, 5, 1] = 6
    save_plan(tmp_path / "plan.json", plan)
    found = report_of(capfd, tiny_quantized, *SHORT, "--plan", tmp_path / "plan.json")
    uniform = report_of(capfd, tiny_quantized, *SHORT, "--bits", 3)
    block = checkpoint.shape.down
    more = block.resident_bytes(6) - block.resident_bytes(3)
    assert found["precision"]["expert_bytes"] - uniform["precision"]["expert_bytes"] == more
    assert found["per_window"]["nll"] != uniform["per_window"]["nll"]
    assert found["precision"]["uniform"] is False
    assert "kl" not in found


def test_the_table_names_what_was_measured(tiny_quantized, tiny_moe, capfd):
    assert run("eval", tiny_quantized, *SHORT, "--bits", 4, "--model", tiny_moe) == 0
    shown = capfd.readouterr().out
    for words in ("3 windows of 128 tokens", "perplexity", "KL to model", "quantized", "MB"):
        assert words in " ".join(shown.split())
    assert run("eval", tiny_moe, *SHORT) == 0
    assert "quantized" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--bits", 7), "7 bits are not stored; the checkpoint has 2 to 6"),
        (("--bits", 3, "--plan", "x.json"), "--bits and --plan exclude each other"),
        (("--plan", "nowhere.json"), "nowhere.json is missing"),
        (("--window", 2048, "--windows", 90), "90 needed"),
        (("--model", "nowhere"), "nowhere is not a folder"),
        (("--engine", "vllm", "--model", "x"), "--model goes with --engine reference"),
        (("--dtype", "int8"), "--dtype int8 is not one of float32, bfloat16, float16"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tiny_quantized, capfd, args, message):
    assert run("eval", tiny_quantized, *SHORT, *args) == 2
    captured = capfd.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_another_model_of_the_same_shape_is_not_the_source(
    tiny_quantized, tiny_moe, tmp_path, capfd
):
    """A later checkpoint of the same training, say: KL to it would be no error of quantizing."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_moe / file, tmp_path)
    tensors = load_file(tiny_moe / "model.safetensors")
    down = next(name for name in tensors if "layers.1" in name and "0.down_proj" in name)
    tensors[down] = tensors[down].roll(1, 0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert run("eval", tiny_quantized, *SHORT, "--bits", 3, "--model", tmp_path) == 2
    said = capfd.readouterr().err
    assert f"was not made from {tmp_path}: at 6 bits, layer 1 expert 0 down" in said
    assert len(said.splitlines()) == 1


def test_a_text_that_is_not_there(tiny_quantized, capfd):
    assert run("eval", tiny_quantized, "--text", "nowhere.txt") == 2
    assert "nowhere.txt is not a file" in capfd.readouterr().err


def test_an_unquantized_model_has_no_bits(tiny_moe, capfd):
    assert run("eval", tiny_moe, *SHORT, "--bits", 3) == 2
    assert "is not quantized: --bits and --plan do not apply" in capfd.readouterr().err


@pytest.mark.vllm
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_both_engines_agree(tiny_quantized, random_plan, capfd, dtype, tolerance):
    """Nats of a window's mean; in bfloat16 the engines round in different places."""
    asked = (tiny_quantized, *SHORT, "--plan", random_plan, "--dtype", dtype)
    served = report_of(capfd, *asked, "--engine", "vllm")["per_window"]["nll"]
    reference = report_of(capfd, *asked)["per_window"]["nll"]
    assert served == pytest.approx(reference, abs=tolerance)
    assert served != reference
