"""`pagedweight eval --policy, --frontier, --ablation` and `pagedweight plan` as users run them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from factory import make_checkpoint
from pagedweight.bench import quality
from pagedweight.checkpoint.plan import load_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.cli.main import main
from pagedweight.core.policy import Policy
from pagedweight.core.policy_file import save_policy
from pagedweight.eval.ablation import WHOLE, WITHOUT
from pagedweight.eval.evaluate import expert_bytes
from timelines import FIRST, burst, write

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
SHORT = ("--window", 48, "--windows", 2)


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


def evaluate(capfd, tiny_quantized, tiny_moe, *args):
    asked = ("eval", tiny_quantized, "--model", tiny_moe, *SHORT, *args)
    assert run(*asked, "--json") == 0
    return json.loads(capfd.readouterr().out)


def value(record, policy, metric="kl", text="LICENSE"):
    found = [
        row
        for row in record["rows"]
        if (row["policy"], row["metric"], row["text"]) == (policy, metric, text)
    ]
    assert len(found) == 1
    return found[0]


def test_a_policy_at_a_budget(tiny_quantized, tiny_moe, capfd, tmp_path):
    """A level's bytes are that level, whichever way they are written; rows say what was asked."""
    checkpoint = Checkpoint.open(tiny_quantized)
    shape = (len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
    size = expert_bytes(checkpoint, np.full(shape, 3, np.int8))
    args = ("--text", LICENSE, "--policy", "uniform,dynamic-layer")
    out = tmp_path / "out.json"
    record = evaluate(capfd, tiny_quantized, tiny_moe, *args, "--budget", "3b", "-o", out)
    assert json.loads(out.read_text()) == record
    row = value(record, "uniform")
    assert (row["budget_bytes"], row["mean_bits"], row["resident_bytes"]) == (size, 3.0, size)
    assert 0 < row["low"] <= row["value"] <= row["high"]
    assert row["windows"] == 2
    assert record["texts"] == {"LICENSE": [2, 48]}
    written = evaluate(capfd, tiny_quantized, tiny_moe, *args, "--budget", f"{size / 1e6}MB")
    assert value(written, "uniform")["value"] == row["value"]
    plain = ("eval", tiny_quantized, "--model", tiny_moe, *SHORT, "--text", LICENSE, "--bits", 3)
    assert run(*plain, "--json") == 0
    assert json.loads(capfd.readouterr().out)["kl"]["mean"] == pytest.approx(row["value"], abs=1e-5)


def test_frontier_has_every_policy_and_draws_it(tiny_quantized, tiny_moe, capfd, tmp_path):
    picture = tmp_path / "frontier.png"
    args = ("--frontier", "--budget", "2.5b", "--oracle-windows", 1, "--picture", picture)
    texts = ("--text", f"first={LICENSE}", "--text", LICENSE)
    windows = tmp_path / "w.npz"
    record = evaluate(capfd, tiny_quantized, tiny_moe, *args, *texts, "--per-window", windows)
    assert {row["policy"] for row in record["rows"]} == {
        "bf16",
        "uniform",
        "random",
        "static",
        "dynamic-layer",
        "paged",
        "oracle",
    }
    assert {row["text"] for row in record["rows"]} == {"first", "LICENSE"}
    budget = value(record, "static")["budget_bytes"]
    held = {name: value(record, name)["resident_bytes"] for name in ("static", "paged", "random")}
    assert all(0.97 * budget < size <= budget for size in held.values())
    assert value(record, "dynamic-layer")["resident_bytes"] > budget
    kl = {name: value(record, name)["value"] for name in ("uniform", "random", "paged", "oracle")}
    assert len(set(kl.values())) == 4
    compared = {(row["policy"], row["against"]) for row in record["comparisons"]}
    assert {("static", "uniform"), ("paged", "static"), ("oracle", "static")} <= compared
    assert picture.stat().st_size > 10_000
    stored = np.load(windows)
    assert stored[f"first/paged/{budget}/kl"].mean() == pytest.approx(kl["paged"])


def test_ablation_compares_with_the_whole(tiny_quantized, tiny_moe, capfd, tmp_path):
    picture, policy = tmp_path / "ablation.png", tmp_path / "policy.json"
    save_policy(Policy(prior_tokens=8.0), policy)  # so that 48 tokens are taken at their word
    args = ("--ablation", "--budget", "2.5b", "--text", LICENSE, "--picture", picture)
    args += ("--policy-file", policy)
    rows = evaluate(capfd, tiny_quantized, tiny_moe, *args)["rows"]
    over = {row["configuration"]: row for row in rows if row["text"] == "all"}
    assert list(over) == [WHOLE, *WITHOUT]
    for name in ("w/o routing statistics", "w/o page movement"):
        row = over[name]
        gap = row["kl"]["mean"] - over[WHOLE]["kl"]["mean"]
        assert row["kl_more"]["mean"] == pytest.approx(gap)
        assert gap != 0
        assert row["kl_more"]["low"] <= gap <= row["kl_more"]["high"]
    assert "kl_more" not in over[WHOLE]
    assert picture.stat().st_size > 5_000


def test_pressure_gives_every_window_what_the_server_had(tiny_quantized, tiny_moe, capfd, tmp_path):
    """Paged follows a recorded run, window by window; what cannot move lives at its worst."""
    run_of = write(tmp_path / "run.jsonl", burst())
    stored = tmp_path / "w.npz"
    args = ("--text", LICENSE, "--policy", "static,paged", "--per-window", stored)
    base = ("eval", tiny_quantized, "--model", tiny_moe, "--window", 48, "--windows", 4)
    assert run(*base, *args, "--pressure", run_of, "--json") == 0
    record = json.loads(capfd.readouterr().out)
    budgets = record["pressure"]["LICENSE"]
    assert budgets[0] > budgets[1] > budgets[2] == min(budgets)
    static, paged = value(record, "static"), value(record, "paged")
    assert static["resident_bytes"] <= static["budget_bytes"] == min(budgets)
    assert static["budget_bytes"] < paged["resident_bytes"] <= np.mean(budgets)
    assert paged["value"] < static["value"]
    kl = np.load(stored)
    assert (
        kl[f"LICENSE/paged/{min(budgets)}/kl"][0] < 0.5 * kl[f"LICENSE/paged/{min(budgets)}/kl"][1]
    )


def test_a_run_without_requests_is_no_pressure(tiny_quantized, tiny_moe, capfd, tmp_path):
    idle = write(tmp_path / "idle.jsonl", [FIRST])
    asked = ("eval", tiny_quantized, "--model", tiny_moe, *SHORT, "--text", LICENSE)
    assert run(*asked, "--policy", "paged", "--pressure", idle) == 2
    assert "no request ran" in capfd.readouterr().err


def test_tables_for_people(tiny_quantized, tiny_moe, capfd):
    asked = ("eval", tiny_quantized, "--model", tiny_moe, *SHORT, "--text", LICENSE)
    assert run(*asked, "--policy", "static", "--budget", "3b") == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "static" in shown
    assert "5.5 MB" in shown
    assert "95% interval" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--policy", "static"), "--policy needs --budget"),
        (("--policy", "paged", "--pressure", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--policy", "paged", "--budget", "3b", "--pressure", "x"), "takes the place of --budget"),
        (("--frontier", "--pressure", "x"), "--pressure goes with --policy"),
        (("--pressure", "x"), "go with --policy, --frontier or --ablation"),
        (("--policy", "best", "--budget", "3b"), "policy 'best' is not one of uniform"),
        (("--policy", "static", "--frontier"), "--policy and --frontier exclude each other"),
        (("--policy", "static", "--budget", "7b"), "the checkpoint stores 2 to 6 bits"),
        (("--policy", "static", "--budget", "3 pages"), "is not a size"),
        (("--policy", "static", "--budget", "1MB"), "does not hold the routed experts"),
        (("--frontier", "--bits", 3), "policies choose the bits"),
        (("--frontier", "--replan-tokens", 0), "--replan-tokens 0: give at least 1"),
        (("--frontier", "--dtype", "int8"), "--dtype int8 is not one of"),
        (("--frontier", "--dtype", "tf32"), "it goes with --device cuda"),
        (("--frontier", "--text", LICENSE), "two texts are called LICENSE"),
        (("--frontier", "-o", "nowhere/x.json"), "there is no folder"),
        (("--frontier", "-o", "."), "cannot write .: it is a folder"),
        (("--frontier", "--per-window", "."), "cannot write .: it is a folder"),
        (("--frontier", "--picture", "x.bmp"), "pictures are written as .png"),
        (("--ablation", "--per-window", "x.npz"), "--per-window goes with"),
        (("--frontier", "--budget", ""), "a budget of '' is not a size"),
        (("--budget", "3b"), "go with --policy, --frontier or --ablation"),
        (("--seats", 2), "go with --policy, --frontier or --ablation"),
        (("--load", "constant"), "go with --policy, --frontier or --ablation"),
        (("--frontier", "--text", f"={LICENSE}"), "write FILE or NAME=FILE"),
        (("--text", f"b={LICENSE}"), "2 texts: several go with"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tiny_quantized, tiny_moe, capfd, args, message):
    base = ("eval", tiny_quantized, "--model", tiny_moe, *SHORT, "--text", LICENSE)
    assert run(*base, *args) == 2
    captured = capfd.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_another_source_is_refused(tiny_quantized, tmp_path, capfd):
    """KL to a model that was not quantized means nothing."""
    other = make_checkpoint(tmp_path / "other")
    asked = ("eval", tiny_quantized, "--model", other, *SHORT, "--text", LICENSE, "--frontier")
    assert run(*asked) == 2
    assert "was not made from" in capfd.readouterr().err


def test_policies_need_the_source(tiny_quantized, capfd):
    asked = ("eval", tiny_quantized, *SHORT, "--text", LICENSE, "--frontier")
    assert run(*asked) == 2
    assert "give --model" in capfd.readouterr().err


@pytest.mark.parametrize("policy", ["static", "uniform", "random"])
def test_a_plan_file_is_the_policys_bits(tiny_quantized, capfd, tmp_path, policy):
    out, checkpoint = tmp_path / "plan.json", Checkpoint.open(tiny_quantized)
    asked = ("plan", tiny_quantized, "--policy", policy, "--budget", "3.4b", "-o", out)
    assert run(*asked) == 0
    assert policy in capfd.readouterr().out
    plan = load_plan(out, checkpoint)
    shape = (len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
    low, high = (expert_bytes(checkpoint, np.full(shape, b, np.int8)) for b in (3, 4))
    budget = low + 0.4 * (high - low)
    assert 0.97 * budget < expert_bytes(checkpoint, plan) <= budget
    assert run(*asked, "--seed", 1) == 0
    again = load_plan(out, checkpoint)
    assert (again != plan).any() == (policy != "static")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--budget", "3b", "-o", "."), "cannot write .: it is a folder"),
        (("--budget", "3b", "-o", "nowhere/plan.json"), "there is no folder"),
        (("--budget", "inf", "-o", "plan.json"), "a budget of 'inf' is not a size"),
        (("--budget", "-1MB", "-o", "plan.json"), "a size is 0 to"),
        (("--budget", "1e30GiB", "-o", "plan.json"), "a size is 0 to"),
    ],
)
def test_plan_refuses_budgets_and_places(tiny_quantized, capfd, args, message):
    assert run("plan", tiny_quantized, *args) == 2
    captured = capfd.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["plan", "eval", "quantize", "calibrate"])
def test_seeds_are_not_negative(capfd, command):
    assert run(command, "x", "--seed", -1) == 2
    assert "'--seed'" in capfd.readouterr().err


def test_plan_refuses_what_does_not_fit(tiny_quantized, capfd, tmp_path):
    out = tmp_path / "plan.json"
    assert run("plan", tiny_quantized, "--budget", "100KB", "-o", out) == 2
    assert "a budget of 100000 bytes does not hold" in capfd.readouterr().err
    assert not out.exists()


def test_parts_make_the_results_of_all_texts(tiny_quantized, tiny_moe, tmp_path):
    parts = []
    for name in ("code", "c4"):
        parts.append(tmp_path / f"{name}.npz")
        args = ["--text", f"{name}={LICENSE}", "--window", "48", "--windows", "2"]
        args += ["--budgets", "2.5b", "--ablated", "2.5b", "--oracle-windows", "1"]
        quality.main([str(tiny_quantized), str(tiny_moe), *args, "--part", str(parts[-1])])
    merged = [str(tiny_quantized), str(tiny_moe), "--merge", *map(str, parts), "-o", str(tmp_path)]
    quality.main(merged)
    found = json.loads((tmp_path / "quality.json").read_text())
    assert found["texts"] == {"code": [2, 48], "c4": [2, 48]}
    code, c4 = (value(found, "paged", text=text)["value"] for text in ("code", "c4"))
    assert code == pytest.approx(c4, rel=1e-5)  # the same text under two names
    rows = json.loads((tmp_path / "ablation.json").read_text())["rows"]
    whole = next(r for r in rows if r["configuration"] == WHOLE and r["text"] == "all")
    assert whole["kl"]["mean"] == pytest.approx(code, rel=1e-5)
    assert "c4_ppl" in whole
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    assert (tmp_path / "ablation.png").stat().st_size > 5_000
