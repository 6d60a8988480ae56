"""`--plan POLICY:BUDGET`: a baseline in a real engine says what the reference says at its bits."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedweight.calibrate.text import CalibrationTokens
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.cli.main import main
from pagedweight.core.policies import Assignment
from pagedweight.core.size_table import SizeTable
from pagedweight.errors import UserError
from pagedweight.eval.fleet import Fleet
from pagedweight.kernels.contract import BlockTable
from pagedweight.quantize.pipeline import QuantizeOptions, quantize_checkpoint
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.plans import Baseline, assignment_of, plan_of
from pagedweight.serving.two_levels import WINDOW, TwoLevels

TOKENS = torch.randint(5, 500, (WINDOW + 60,), generator=torch.Generator().manual_seed(2))
PLANS = ("uniform:3.5b", "random:3.5b", "static:3.5b", "dynamic-layer:3.5b")


@pytest.fixture(scope="module")
def calibrated(tiny_moe, tmp_path_factory):
    """tiny-moe with sensitivities of a kind: routed tokens times error."""
    out = tmp_path_factory.mktemp("calibrated") / "tiny-q"
    random = torch.Generator().manual_seed(3)
    said = {"text": "t", "sequences": "4", "sequence_length": "128", "seed": "0"}
    tokens = CalibrationTokens(torch.randint(5, 500, (4, 128), generator=random), said)
    options = QuantizeOptions(calibration=tokens, codes="kmeans")
    quantize_checkpoint(SourceCheckpoint.open(tiny_moe), out, options, lambda *_: None)
    return out


@pytest.mark.vllm
def test_each_takes_effect_and_is_what_the_reference_computes(calibrated, tmp_path):
    """The first as `serve` starts it; see baselines_engine for the others."""
    plans, out = [*reversed(PLANS)], tmp_path / "said.npz"
    program = Path(__file__).with_name("baselines_engine.py")
    asked = [sys.executable, program, calibrated, out, json.dumps(TOKENS.tolist()), *plans]
    subprocess.run(asked, check=True)
    found = [np.load(out)[plan] for plan in plans]
    checkpoint = Checkpoint.open(calibrated)
    seats = [assignment_of(checkpoint, ServeOptions(plan=plan)) for plan in plans]
    fleet = Fleet(checkpoint, None, "float32", "cpu")
    logits = fleet.run(TOKENS, seats).logits.log_softmax(-1)[:, :-1]
    wanted = logits.gather(2, TOKENS[1:].expand(len(seats), -1)[..., None])[..., 0].numpy()
    for own, (mine, reference) in enumerate(zip(found, wanted, strict=True)):
        assert np.abs(mine - reference).max() < 2e-3
        for other in range(own):
            assert np.abs(mine - found[other]).mean() > 1e-2


def test_a_budget_and_a_seed_count(calibrated):
    checkpoint = Checkpoint.open(calibrated)
    sizes = SizeTable.of(checkpoint.shape, checkpoint.bits)

    def bits(plan: str) -> np.ndarray:
        return plan_of(checkpoint, ServeOptions(plan=plan))

    for policy in ("uniform", "random", "static"):
        small, large = (
            Assignment(bits(f"{policy}:{size}")).resident_bytes(sizes) for size in ("3b", "4.5b")
        )
        assert small < large
    assert (bits("random:3.5b:1") != bits("random:3.5b:2")).any()
    assert (bits("random:3.5b") == bits("random:3.5b:0")).all()
    with pytest.raises(UserError, match="blocks have two levels"):
        bits("dynamic-layer:3.5b")


def test_a_file_of_that_name_is_a_file_and_names_are_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Baseline.of("static:3b") == Baseline("static", "3b", 0)
    (tmp_path / "static:3b").touch()
    assert Baseline.of("static:3b") is None
    assert Baseline.of("plans/static.json") is None
    with pytest.raises(UserError, match="paged is --memory without --plan"):
        Baseline.of("paged:3b")
    with pytest.raises(UserError, match="'best' is not one of uniform"):
        Baseline.of("best:3b")
    with pytest.raises(UserError, match="random needs a budget, for example random:3b"):
        Baseline.of("random")
    with pytest.raises(UserError, match="the seed 'x' is not a whole number"):
        Baseline.of("random:3b:x")


def command(capsys, *arguments: object) -> list[str]:
    with pytest.raises(SystemExit) as end:
        main(["serve", *map(str, arguments), "--print-command"])
    assert end.value.code == 0
    return shlex.split(capsys.readouterr().out)


def test_within_one_memory_two_levels_leave_kv_the_rest(calibrated, capsys):
    checkpoint = Checkpoint.open(calibrated)
    plan, memory = "dynamic-layer:3.5b", 64 << 20
    said = command(capsys, calibrated, "--plan", plan, "--memory", memory)
    held = assignment_of(checkpoint, ServeOptions(plan=plan)).resident_bytes(
        SizeTable.of(checkpoint.shape, checkpoint.bits)
    )
    assert int(said[said.index("--kv-cache-memory-bytes") + 1]) == memory - held
    assert "--worker-cls" not in said
    said = command(capsys, calibrated, "--plan", "static:3.5b", "--memory", memory)
    assert "--worker-cls" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    (
        (("--memory", "1KiB"), "both levels of --plan dynamic-layer:3.5b take"),
        (("--memory", "64MiB", "--freeze"), "--freeze does not go with --plan"),
    ),
)
def test_what_two_levels_refuse(calibrated, capsys, flags, message):
    with pytest.raises(SystemExit) as end:
        main(["serve", str(calibrated), "--plan", "dynamic-layer:3.5b", *flags])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def two_levels(share: float) -> TwoLevels:
    error = torch.tensor([0.1, 1.0, 3.0])
    return TwoLevels(BlockTable.empty(3), share, error, torch.zeros(WINDOW))


def tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn((count, 16), generator=gen) * torch.rand((count, 1), generator=gen).exp()
    ids = torch.rand((count, 3), generator=gen).argsort(1)[:, :2].int()
    return x, torch.rand((count, 2), generator=gen), ids


def test_a_long_call_chooses_the_largest_estimates():
    x, r, ids = tokens(WINDOW, 1)
    chosen = two_levels(0.25).choose(x, r, ids)
    error = torch.tensor([0.1, 1.0, 3.0])[ids.long()]
    estimate = x.square().sum(1) * (r.square() * error).sum(1)
    assert chosen.sum() == WINDOW // 4
    assert estimate[chosen].min() > estimate[~chosen].max()


@pytest.mark.parametrize("share", (0.1, 0.5, 0.9))
def test_one_token_at_a_time_meets_the_share(share):
    choice, steps = two_levels(share), 3000
    x, r, ids = tokens(steps, 2)
    found = [bool(choice.choose(x[i : i + 1], r[i : i + 1], ids[i : i + 1])) for i in range(steps)]
    assert np.mean(found[WINDOW:]) == pytest.approx(share, abs=0.03)
