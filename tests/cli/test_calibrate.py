"""`pagedweight calibrate` as a user runs it: on the demo model, refused, searched again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from factory import make_checkpoint
from pagedweight.calibrate.search import run as run_module
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.tensorfile import sha256_file
from pagedweight.cli.main import main
from pagedweight.core.policy import Policy
from pagedweight.core.policy_file import load_policy, save_policy
from pagedweight.serving.elastic.budget import calibration_of

TEXT = "A tree is a list of lists; rivers, boats and the seven winds are in order {}. "


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


def digests(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_file(p) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def out(tiny_quantized: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_quantized, tmp_path / "out"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(TEXT.format(n * n % 97) for n in range(400)))
    return path


def test_calibrate_search_and_search_again(
    tiny_moe: Path, out: Path, text: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(run_module, "RANGES", {"floor": (3, 2), "exponent": (0.0, 1.0)})
    before = digests(out)
    files = [tmp_path / name for name in ("report.json", "kept.npz", "policy.json", "again.json")]
    report, kept, policy, again = files
    amount = ["--data", text, "--sequences", 6, "--sequence-length", 64]
    more = ["--report", report, "--measurements", kept, "--policy-out", policy]
    assert run("calibrate", out, tiny_moe, *amount, *more) == 0
    said = capsys.readouterr().out
    assert "calibrated on 6 sequences of 64 tokens" in said
    assert "held-out R^2" in said
    after = digests(out)
    assert {name for name in after if after[name] != before[name]} == {
        "pagedweight.json",
        "experts/calibration.safetensors",
    }
    checkpoint = Checkpoint.open(out)
    assert checkpoint.verify() == []
    found = checkpoint.calibration()
    assert found.metadata["sensitivity"] == "per-token"
    assert found.metadata["labels"] == "model"
    assert found.metadata["codes_text"] == "none"  # what codes were fitted to is not forgotten
    assert set(found.residual) == {
        f"residual.{name}" for name in ("center", "weight", "bias", "confidence", "clip")
    }
    assert calibration_of(checkpoint).measured
    content = json.loads(report.read_text())
    assert content["coverage"]["experts"] == 64
    assert len(content["coverage"]["unseen"]) == int((found.tokens == 0).sum())
    assert len(content["residual"]) == 2 * 4
    assert {"forward", "head", "backward"} <= content["seconds"].keys()
    assert content["search"]["tried"]
    assert isinstance(load_policy(policy), Policy)
    assert run("calibrate", out, "--measurements", kept, "--policy-out", again) == 0
    assert load_policy(again) == load_policy(policy)
    assert digests(out) == after


def test_unseen_experts_are_said_and_count_as_the_least(
    tiny_moe: Path, out: Path, text: Path, capsys
) -> None:
    """Three tokens cannot reach all experts."""
    amount = ["--data", text, "--sequences", 1, "--sequence-length", 3]
    assert run("calibrate", out, tiny_moe, *amount) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "never (layer/expert)" in said
    planner = calibration_of(Checkpoint.open(out))
    layer, expert = planner.unseen[0]
    seen = [e for e in range(16) if (layer, e) not in planner.unseen]
    least = planner.sensitivity[layer, seen].min(axis=0)
    np.testing.assert_array_equal(planner.sensitivity[layer, expert], least)
    assert (planner.sensitivity > 0).all()


@pytest.mark.parametrize(
    "arguments, message",
    (
        ([], "--data FILE"),
        (["--measurements", "{kept}"], "--data FILE"),
        (["--data", "{text}", "--sequences", "5000"], "give at most --sequences"),
        (["--data", "nowhere.txt"], "is not a file"),
        (["--data", "{text}", "--sensitivity", "exact"], "is not one of per-token, factored"),
        (["--data", "{text}", "--labels", "data"], "is not one of model, text"),
        (["--data", "{text}", "--device", "tpu"], "is not one of cpu, cuda"),
        (["--data", "{text}", "--report", "no/such/folder.json"], "there is no folder"),
        (["--data", "{text}", "--report", "."], "cannot write .: it is a folder"),
        (["--data", "{text}", "--measurements", "."], "cannot write .: it is a folder"),
        (["--data", "{text}", "--policy-out", "."], "cannot write .: it is a folder"),
        (["--data", "{text}", "--sequences", "3", "--search"], "at least 4 calibration sequences"),
        (["--search", "--measurements", "{text}"], "cannot read measurements"),
    ),
)
def test_what_cannot_be_changes_nothing(
    tiny_moe: Path, out: Path, text: Path, capsys, arguments: list[str], message: str
) -> None:
    before = digests(out)
    named = [a.format(text=text, kept=out.parent / "kept.npz") for a in arguments]
    assert run("calibrate", out, tiny_moe, *named) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("pagedweight: ")
    assert message in said[-1]
    assert digests(out) == before


def test_another_model_is_refused(tiny_moe: Path, out: Path, text: Path, tmp_path, capsys) -> None:
    before = digests(out)
    other = make_checkpoint(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_moe / name, other)
    arguments = ["--data", text, "--sequences", 1, "--sequence-length", 8]
    assert run("calibrate", out, other, *arguments) == 2
    assert "was not made from" in capsys.readouterr().err
    twin = Path(shutil.copytree(tiny_moe, tmp_path / "twin"))
    weights = twin / "model.safetensors"
    swapped = weights.read_bytes().replace(b"layers.0.mlp.experts", b"layers.9.mlp.experts")
    swapped = swapped.replace(b"layers.1.mlp.experts", b"layers.0.mlp.experts")
    weights.write_bytes(swapped.replace(b"layers.9.mlp.experts", b"layers.1.mlp.experts"))
    assert run("calibrate", out, twin, *arguments) == 2  # the same shapes, other weights
    assert "is off by" in capsys.readouterr().err
    assert digests(out) == before


def test_a_file_is_not_a_checkpoint(text: Path, capsys) -> None:
    assert run("calibrate", text, text, "--data", text) == 2
    assert capsys.readouterr().err == f"pagedweight: {text} is not a folder\n"


def test_measurements_cut_short_are_refused(out: Path, tmp_path: Path, capsys) -> None:
    whole = tmp_path / "whole.npz"
    np.savez_compressed(whole, length=np.arange(5000).reshape(50, 100))
    for name, content in (
        ("cut.npz", whole.read_bytes()[:-40]),
        ("other.npz", whole.read_bytes()),
        ("empty.npz", b""),
    ):
        (tmp_path / name).write_bytes(content)
        assert run("calibrate", out, "--search", "--measurements", tmp_path / name) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"pagedweight: cannot read measurements {tmp_path / name}: ")
        assert len(said.splitlines()) == 1


def test_inspect_explains_a_policy(tmp_path: Path, capsys) -> None:
    path = tmp_path / "policy.json"
    save_policy(Policy(alpha=1.25), path)
    assert run("inspect", "--policy", path) == 0
    said = capsys.readouterr().out
    for word in ("alpha 1.25", "the bytes of 3 bits", "emergency", "prior_tokens 256"):
        assert word in said
    assert run("inspect", "--policy", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["alpha"] == 1.25
    assert run("inspect", tmp_path, "--policy", path) == 2
    assert run("inspect", "--policy", path, "--budget", "1GiB") == 2
    assert run("inspect", "--policy", path, "--plan") == 2
    assert run("inspect", "--policy", tmp_path / "none.json") == 2
