"""Every family in real vLLM, read through planes, says what transformers' model of the family says
with the dequantized experts.

Two engines for each family, with fixed and with elastic precision. Everything but the experts is
vLLM's: routing with and without renormalization, in groups and with a bias, shared experts, latent
attention, multipliers.
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
from tiny_models import MODELS, save_tiny

from pagedweight.checkpoint.plan import load_plan, save_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.eval.reference import load_quantized
from pagedweight.quantize.pipeline import QuantizeOptions, quantize_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
CPU = torch.device("cpu")
TOLERANCE = 1e-4
"""Of log-probabilities in float32. Measured: up to 1e-5; with the bits of experts exchanged, 0.2 to
1.3 in the mean."""


@pytest.fixture(scope="module")
def folder(tiny_moe, tmp_path_factory) -> Path:
    """All families quantized at 2 to 4 bits and served, each at random bits for each block."""
    folder, jobs = tmp_path_factory.mktemp("families"), []
    for name in MODELS:
        source = SourceCheckpoint.open(save_tiny(name, folder / f"{name}-source", tiny_moe))
        out, plan = folder / name, folder / f"{name}-plan.json"
        quantize_checkpoint(source, out, QuantizeOptions(bits=(2, 3, 4)), lambda *_: None)
        shape = (len(source.moe_layers), source.shape.experts, 2)
        save_plan(plan, np.random.default_rng(7).choice([2, 3, 4], shape))
        jobs.append({"name": f"{name}-fixed", "path": str(out), "plan": str(plan)})
        jobs.append({"name": f"{name}-elastic", "path": str(out), "memory": MODELS[name].memory})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with (folder / "log.txt").open("w") as log:
        command = [sys.executable, served.__file__, str(folder / "jobs.json"), str(folder)]
        subprocess.run(command, stdout=log, stderr=log, timeout=1100, check=True)
    return folder


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


@pytest.mark.parametrize("name", MODELS)
def test_vllm_says_what_the_reference_says(name, folder):
    said = result(folder, f"{name}-fixed")
    assert isinstance(said, list), said["error"]
    checkpoint = Checkpoint.open(folder / name)
    plan = load_plan(folder / f"{name}-plan.json", checkpoint)
    off = differences(checkpoint, plan, said)
    assert len(off) > len(served.PROMPTS) * (served.NEW_TOKENS + 2)
    wrong = differences(checkpoint, np.roll(plan, 1, axis=1), said)
    print(f"{name}: most {off.max():.1e}; bits of other experts, mean {wrong.mean():.1e}")
    assert off.max() < TOLERANCE
    assert wrong.mean() > 1000 * TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_a_burst_takes_bits_and_gives_them_back_whole(name, folder):
    found = result(folder, f"{name}-elastic")
    assert "error" not in found, found["error"]
    asked, answered = found["requests"]
    start, lowest, end = found["bits"]
    room, most, room_after = found["usable"]
    print(f"{name}: {asked} requests, bits {start:.2f} to {lowest:.2f}, blocks {room} to {most}")
    assert answered == asked
    assert lowest < start - 0.5
    assert most > room
    assert (end, room_after) == (start, room)
    checkpoint = Checkpoint.open(folder / name)
    plan = np.array(found["plan"]).reshape(len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
    assert differences(checkpoint, plan, found["said"]).max() < TOLERANCE
