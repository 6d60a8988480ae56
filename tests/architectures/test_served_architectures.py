"""Every family in real vLLM, read through planes, says what transformers' model of the family says
with the dequantized experts.

Engines for each family with fixed and with elastic precision, on one rank and on two. Everything
but the experts is vLLM's: routing with and without renormalization, in groups and with a bias,
shared experts, latent attention, multipliers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import served
import torch
from budgets import PAGE, tiny_memory
from tiny_models import MODELS, save_tiny

from pagedweight.checkpoint.plan import load_plan, save_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.eval.reference import load_quantized
from pagedweight.quantize.pipeline import QuantizeOptions, quantize_checkpoint
from pagedweight.serving.elastic.dealing import Dealing, Parallel

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Of log-probabilities in float32. Measured: up to 1e-5; with the bits of experts exchanged, 0.2 to
1.3 in the mean."""


RANKS = {"tp": Parallel(tensor=2), "ep": Parallel(tensor=2, experts=True)}
"""Tensor parallelism cuts experts, expert parallelism deals them out."""
STAGES = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,  # see serving/conflicts.py
    "compilation_config": {"backend": "eager"},  # traced, not compiled: that takes half a minute
}
TWO_RANKS = [(name, kind) for name in MODELS for kind in RANKS]
FIXED = (*RANKS, "pp")
"""Served at fixed bits by two ranks; the first family only."""
REFUSALS = 3
"""Uploads that a rank refuses in a burst."""
USUAL = {("qwen2_moe", "tp"), ("qwen2_moe", "ep"), ("mixtral", "tp"), ("gemma4", "ep")}
USUAL |= {("qwen3_moe", "ep"), ("deepseek_v3", "tp"), ("granitemoe", "ep")}
"""Of TWO_RANKS: run every time. Together each family's and each store's way of holding parts."""


def flags(kind: str) -> dict[str, Any]:
    """vLLM's, for two ranks of a kind; "pp": two stages."""
    if kind == "pp":
        return STAGES
    return {"tensor_parallel_size": 2, "enable_expert_parallel": RANKS[kind].experts}


@pytest.fixture(scope="module")
def folder(tiny_moe, tmp_path_factory) -> Path:
    """All families quantized at 2 to 4 bits, and a plan with random bits for each block."""
    folder = tmp_path_factory.mktemp("families")
    for name in MODELS:
        source = SourceCheckpoint.open(save_tiny(name, folder / f"{name}-source", tiny_moe))
        out, plan = folder / name, folder / f"{name}-plan.json"
        quantize_checkpoint(source, out, QuantizeOptions(bits=(2, 3, 4)), lambda *_: None)
        shape = (len(source.moe_layers), source.shape.experts, 2)
        save_plan(plan, np.random.default_rng(7).choice([2, 3, 4], shape))
    return folder


def serve(folder: Path, jobs: list[dict[str, Any]]) -> Path:
    """`folder`, with the results of `jobs` in it."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, served.__file__, str(folder / "jobs.json"), str(folder)]
        subprocess.run(command, stdout=log, stderr=log, timeout=1100, check=True)
    return folder


def fixed(folder: Path, name: str, kind: str | None = None) -> dict[str, Any]:
    """The job that serves a family at the bits of its plan, on two ranks of a kind or on one."""
    job = {"path": str(folder / name), "plan": str(folder / f"{name}-plan.json")}
    if kind is None:
        return {"name": f"{name}-fixed", **job}
    return {"name": f"{name}-{kind}-fixed", **job, "ranks": flags(kind)}


def elastic(folder: Path, name: str, kind: str | None = None) -> dict[str, Any]:
    """The job that serves a family through a burst."""
    checkpoint = Checkpoint.open(folder / name)
    memory = tiny_memory(checkpoint, Parallel() if kind is None else RANKS[kind])
    job = {"path": str(folder / name), "memory": memory, "page_bytes": PAGE}
    if kind is None:
        return {"name": f"{name}-elastic", **job}
    return {"name": f"{name}-{kind}", **job, "ranks": flags(kind)}


@pytest.fixture(scope="module")
def one_rank(folder) -> Path:
    """Every family served by one rank, and what two ranks are tried with every time."""
    jobs = [make(folder, name) for name in MODELS for make in (fixed, elastic)]
    jobs += [fixed(folder, "qwen2_moe", kind) for kind in FIXED]
    refused = elastic(folder, "qwen2_moe", "tp")
    jobs.append({**refused, "name": "qwen2_moe-tp-refused", "refuse": REFUSALS})
    return serve(folder, jobs + [elastic(folder, *pair) for pair in TWO_RANKS if pair in USUAL])


@pytest.fixture(scope="module")
def two_ranks(folder) -> Path:
    """Every family on two ranks that `one_rank` leaves out."""
    return serve(folder, [elastic(folder, *pair) for pair in TWO_RANKS if pair not in USUAL])


def differences(checkpoint: Checkpoint, plan: np.ndarray, said: list) -> np.ndarray:
    """|difference| of each log-probability from the reference's at `plan`."""
    model = load_quantized(checkpoint, plan, torch.float32, CPU)
    off: list[float] = []
    for tokens, found in said:
        wanted = model.logits(torch.tensor(tokens)).float().log_softmax(-1)
        of_next = wanted[torch.arange(len(found)), torch.tensor(tokens[1:])]
        off += (of_next - torch.tensor(found)).abs().tolist()
    return np.array(off)


def result(folder: Path, name: str) -> Any:
    """What came back from an engine."""
    path = folder / f"{name}.json"
    assert path.exists(), (folder / "log.txt").read_text()[-3000:]
    return json.loads(path.read_text())


def says_what_the_reference_says(folder: Path, name: str, job: str) -> None:
    said = result(folder, job)
    assert isinstance(said, list), said["error"]
    checkpoint = Checkpoint.open(folder / name)
    plan = load_plan(folder / f"{name}-plan.json", checkpoint)
    off = differences(checkpoint, plan, said)
    assert len(off) > len(served.PROMPTS) * (served.NEW_TOKENS + 2)
    wrong = differences(checkpoint, np.roll(plan, 1, axis=1), said)
    print(f"{job}: most {off.max():.1e}; bits of other experts, mean {wrong.mean():.1e}")
    assert off.max() < TOLERANCE
    assert wrong.mean() > 1000 * TOLERANCE


def takes_bits_and_gives_them_back(folder: Path, name: str, job: str) -> dict[str, Any]:
    found = result(folder, job)
    assert "error" not in found, found["error"]
    asked, answered = found["requests"]
    start, lowest, end = found["bits"]
    room, most, room_after = found["usable"]
    print(f"{job}: {asked} requests, bits {start:.2f} to {lowest:.2f}, blocks {room} to {most}")
    assert answered == asked
    assert lowest < start - 0.5
    assert most > room
    assert (end, room_after) == (start, room)
    checkpoint = Checkpoint.open(folder / name)
    plan = np.array(found["plan"]).reshape(len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
    assert differences(checkpoint, plan, found["said"]).max() < TOLERANCE
    return found


@pytest.mark.parametrize("name", MODELS)
def test_vllm_says_what_the_reference_says(name, one_rank):
    says_what_the_reference_says(one_rank, name, f"{name}-fixed")


@pytest.mark.parametrize("kind", FIXED)
def test_two_ranks_at_fixed_bits_say_what_the_reference_and_one_rank_say(kind, one_rank):
    says_what_the_reference_says(one_rank, "qwen2_moe", f"qwen2_moe-{kind}-fixed")
    said = [result(one_rank, name) for name in ("qwen2_moe-fixed", f"qwen2_moe-{kind}-fixed")]
    for (tokens, alone), (others, together) in zip(*said, strict=True):
        assert tokens == others
        assert np.abs(np.subtract(alone, together)).max() < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_burst_takes_bits_and_gives_them_back_whole(name, one_rank):
    takes_bits_and_gives_them_back(one_rank, name, f"{name}-elastic")


def test_what_one_rank_refuses_the_other_gives_up_too(one_rank):
    """Ranks have the same bits whenever they are looked at (served.py), and in the end the tokens
    are the reference's."""
    found = takes_bits_and_gives_them_back(one_rank, "qwen2_moe", "qwen2_moe-tp-refused")
    (rolled_back, given_up), (rolled_back_there, _) = found["gave_up"]
    print(f"rank 0 gave up {given_up}, rank 1 rolled back {rolled_back_there}")
    assert rolled_back == 0
    assert found["rolled_back"] == rolled_back_there >= REFUSALS  # what metrics show
    assert given_up > 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(*pair, marks=() if pair in USUAL else pytest.mark.long, id="-".join(pair))
        for pair in TWO_RANKS
    ],
)
def test_a_burst_on_two_ranks(name, kind, request):
    """Both commit the same plan, each out of its own memory; nothing is refused or rolled back."""
    folder = request.getfixturevalue("one_rank" if (name, kind) in USUAL else "two_ranks")
    found = takes_bits_and_gives_them_back(folder, name, f"{name}-{kind}")
    checkpoint = Checkpoint.open(folder / name)
    dealt = Dealing.of(checkpoint, RANKS[kind]).holdings
    rows = [len(dealt.rows[dealt.of_rank(rank)]) for rank in range(2)]
    assert found["held"] == rows
    assert sum(rows) == dealt.index.rows * (1 if kind == "ep" else 2)
    assert found["rolled_back"] == 0
