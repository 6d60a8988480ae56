"""What `serve` and `eval --tasks` refuse before an engine starts, and what engines refuse: one
sentence, exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest
import torch

from pagedweight.cli.main import main
from pagedweight.errors import UserError
from pagedweight.serving import vllm_cli
from pagedweight.serving.refusals import VARIABLE, told


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--memory", "0"), "--memory 0: give at least a byte"),
        (("--memory", "-1GiB"), "a size is 0 to"),
        (("--memory", "infGiB"), "'infGiB' is not a size"),
        (("--memory", "1KiB"), "the experts at their floor alone take"),
        (("--memory", "4MiB", "--bits", 6), "the experts at these bits alone take"),
        (("--memory", "1GiB", "--page-bytes", "-5"), "--page-bytes -5: give at least"),
        (("--memory", "1GiB", "--page-bytes", "0"), "--page-bytes 0: give at least"),
        (("--memory", "1GiB", "--gpu-reserve", "1GiB"), "together with --gpu-memory"),
        (("--memory", "1GiB", "--trace", "{file}"), "--trace {file} cannot be made"),
        (("--memory", "1GiB", "--trace", "{file}/t"), "is no folder that can be written"),
        (("--memory", "1GiB", "--replay", "{file}"), "line 1 is not a line of a bit trace"),
        (("--memory", "1GiB", "--replay", "{file}.none"), "cannot read bit trace"),
        (("--memory", "1GiB", "--policy", "{file}"), "is not JSON"),
        (("--gpu-memory", "0"), "--gpu-memory 0: give the GPU's memory"),
    ],
)
def test_serve(tiny_quantized, tmp_path, capsys, flags, message):
    file = tmp_path / "file"
    file.write_text("no JSON")
    given = [str(flag).format(file=file) for flag in flags]
    assert run("serve", tiny_quantized, "--print-command", *given) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert message.format(file=file) in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("size", ["24GiB", "auto"])
def test_gpu_memory_without_a_gpu(tiny_quantized, capsys, size):
    assert run("serve", tiny_quantized, "--print-command", "--gpu-memory", size) == 2
    assert "there is none here: give --memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--memory", "1KiB"), "the experts at their floor alone take"),
        (("--policy-file", "{policy}"), "--policy-file only means something"),
        (("--memory", "1GiB", "--policy-file", "{policy}"), "is not a policy"),
        (("-o", "out.json"), "do not go with --tasks"),
        (("--budget", "3b"), "do not go with --tasks"),
    ],
)
def test_tasks(tiny_quantized, tmp_path, capsys, flags, message):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    policy, data = tmp_path / "policy.json", tmp_path / "gsm8k"
    policy.write_text("{}")
    data.mkdir()
    (data / "test.jsonl").write_text(json.dumps({"question": "1", "answer": "1"}))
    given = [flag.format(policy=policy) for flag in flags]
    asked = ("eval", tiny_quantized, "--tasks", "gsm8k", "--data-dir", tmp_path)
    assert run(*asked, *given) == 2
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1
    assert message in shown.err


REFUSE = """
from pagedweight.errors import UserError
from pagedweight.serving.refusals import told
with told():
    raise UserError("give at least 7 bytes")
"""


def vllm_that(fails, monkeypatch):
    """vLLM's command line, replaced by `fails`."""
    module = types.SimpleNamespace(main=fails)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.cli.main", module)


def test_what_an_engine_refuses_is_the_last_line(monkeypatch, capsys):
    def fails():
        assert subprocess.run([sys.executable, "-c", REFUSE], stderr=subprocess.DEVNULL).returncode
        print("a hundred lines of vLLM's", file=sys.stderr)
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    vllm_that(fails, monkeypatch)
    with pytest.raises(SystemExit) as end:
        vllm_cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == "pagedweight: give at least 7 bytes"
    assert VARIABLE not in os.environ


def test_what_is_refused_in_the_server_itself_too(monkeypatch, capsys):
    def fails():
        raise UserError("bits 9 are not stored")

    vllm_that(fails, monkeypatch)
    with pytest.raises(SystemExit) as end:
        vllm_cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "pagedweight: bits 9 are not stored\n"


def test_what_nobody_refused_is_vllms_to_say(monkeypatch):
    def fails():
        raise RuntimeError("CUDA error")

    vllm_that(fails, monkeypatch)
    with pytest.raises(RuntimeError, match="CUDA error"):
        vllm_cli.main()


def test_without_a_command_that_listens_a_refusal_is_only_raised(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match="no"), told():
        raise UserError("no")
