"""`pagedweight quantize` as a user runs it: on the demo model, killed, resumed, asked what if."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from factory import make_checkpoint, make_faulty
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.cli.main import main
from pagedweight.cli.quantize import parse_bits
from pagedweight.errors import UserError


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    "text, levels", (("2-6", (2, 3, 4, 5, 6)), ("4", (4,)), ("3,4", (3, 4)), (" 2-2 ", (2,)))
)
def test_bits_are_a_range_or_a_list(text: str, levels: tuple[int, ...]) -> None:
    assert parse_bits(text) == levels


@pytest.mark.parametrize("text", ("", "all", "2-", "2..6", "-3", "2-16"))
def test_other_bits_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="for example 2-6"):
        parse_bits(text)


def test_dry_run_says_every_size_and_writes_nothing(tmp_path: Path, capsys) -> None:
    source = make_checkpoint(tmp_path / "source", experts=3)
    before = sorted(tmp_path.rglob("*"))
    assert run("quantize", source, "-o", tmp_path / "out", "--dry-run") == 0
    said = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert run("quantize", source, "-o", tmp_path / "out") == 0
    for path in (tmp_path / "out").rglob("*.safetensors"):
        if path.name != "calibration.safetensors":
            assert f"{path.relative_to(tmp_path / 'out')}" in said
            assert f"{path.stat().st_size:,}" in said
    assert "no calibration" in capsys.readouterr().out


def test_a_fault_is_one_line_and_exit_code_2(tmp_path: Path, capsys) -> None:
    source = make_faulty(tmp_path / "source", "nan")
    assert run("quantize", source, "-o", tmp_path / "out") == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("pagedweight: ")
    assert not (tmp_path / "out").exists()
    sound = make_checkpoint(tmp_path / "sound")
    assert run("quantize", sound, "-o", tmp_path / "out", "--bits", "2-9") == 2
    assert run("quantize", sound, "-o", tmp_path / "out", "--table-dtype", "int8") == 2
    assert not (tmp_path / "out").exists()


def test_codes_are_chosen_or_refused(tmp_path: Path, capsys) -> None:
    source, out = make_checkpoint(tmp_path / "source", layers=1), tmp_path / "out"
    assert run("quantize", source, "-o", out, "--codes", "gptq") == 2
    assert "compensated" in capsys.readouterr().err
    assert run("quantize", source, "-o", out, "--codes", "compensated") == 2
    assert "needs --calibration" in capsys.readouterr().err
    assert not out.exists()
    assert run("quantize", source, "-o", out, "--codes", "kmeans") == 0
    assert "codes: compensated" not in capsys.readouterr().out


def command(model: Path, out: Path, text: Path, *more: str) -> list[str]:
    start = [sys.executable, "-m", "pagedweight.cli.main", "quantize", str(model), "-o", str(out)]
    amount = ["--sequences", "2", "--sequence-length", "64", "--bits", "2-3"]
    return [*start, "--calibration", str(text), *amount, *more]


def test_killed_and_resumed_is_the_same_to_the_byte(tiny_moe: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A tree is a list of lists, and a list is an ordered pair of things. " * 40)
    whole, out = tmp_path / "whole", tmp_path / "out"
    done = subprocess.run(command(tiny_moe, whole, text), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "calibrated on 2 sequences of 64 tokens" in done.stdout
    assert "codes: compensated in" in done.stdout
    victim = subprocess.Popen(
        command(tiny_moe, out, text), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while victim.poll() is None and not (out / "experts/layer-00001.safetensors").exists():
        time.sleep(0.005)
    os.kill(victim.pid, signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    assert not (out / "pagedweight.json").exists()
    resumed = subprocess.run(
        command(tiny_moe, out, text, "--resume"), capture_output=True, text=True
    )
    assert resumed.returncode == 0, resumed.stderr
    files = {p.relative_to(whole): p.read_bytes() for p in whole.rglob("*") if p.is_file()}
    assert files == {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert Checkpoint.open(out).calibration().metadata["sequences"] == "2"
