"""Flags of vLLM that --memory does not go with are refused before anything starts, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedweight.cli.main import main
from pagedweight.errors import UserError
from pagedweight.serving.conflicts import has, number, refuse_with_holdings, refuse_with_memory
from pagedweight.serving.options import ServeOptions


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--expert-placement-strategy", "round_robin"),
            ("--expert-placement-strategy", "usual order"),
        ),
        (("--data-parallel-size=2",), ("--data-parallel-size", "each engine")),
        (("--enable_eplb",), ("--enable-eplb", "moves experts")),
        (("--worker-cls", "x", "--enable-sleep-mode"), ("--worker-cls", "--enable-sleep-mode")),
    ],
)
def test_refused_with_memory_and_not_without(tiny_quantized, capsys, flags, words):
    assert run("serve", tiny_quantized, "--memory", "24MiB", "--", *flags) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    for text in words:
        assert text in shown.err
    assert run("serve", tiny_quantized, "--bits", 3, "--print-command", "--", *flags) == 0
    assert flags[0] in capsys.readouterr().out


def test_an_eager_pipeline_on_the_cpu(tiny_quantized, capsys, monkeypatch):
    command = ("serve", tiny_quantized, "--print-command", "--", "-pp", "2", "--enforce-eager")
    assert run(*command) == 2
    assert "leave --enforce-eager out" in capsys.readouterr().err
    assert run(*command[:-1]) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run(*command) == 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--pipeline-parallel-size", "1", "-dp", "1", "--tensor_parallel_size", "2"),
        ("-tp", "2", "--enable-expert-parallel"),
        ("-pp=2", "-tp=2", "--distributed-executor-backend", "ray"),
    ],
)
def test_ranks_of_every_kind_are_no_conflict(tiny_quantized, capsys, flags):
    command = ("serve", tiny_quantized, "--memory", "24MiB", "--print-command", "--", *flags)
    assert run(*command) == 0
    assert "--scheduler-cls" in capsys.readouterr().out


def test_every_fault_is_listed():
    with pytest.raises(UserError) as caught:
        refuse_with_memory(["--scheduler-cls", "a", "--enable-eplb", "-dp", "4"])
    for flag in ("--scheduler-cls", "--enable-eplb", "--data-parallel-size"):
        assert flag in str(caught.value)


@pytest.mark.parametrize(
    ("given", "flags", "message"),
    [
        (("--trace", "t"), ("-tp", "2", "--enable-expert-parallel"), "--trace: not with"),
        (("--trace", "t"), ("-pp", "2"), "ranks hold different rows"),
        ((), ("-pp", "5"), "4 layers cannot be dealt out to 5"),
        ((), ("-tp", "17", "--enable-expert-parallel"), "16 experts cannot be dealt out to 17"),
        ((), ("-tp", "5"), "256 is 4 tiles of 64: it cannot be cut into 5"),
    ],
)
def test_ranks_that_cannot_be(tiny_quantized, capsys, given, flags, message):
    assert run("serve", tiny_quantized, "--memory", "24MiB", *given, "--", *flags) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_the_memory_of_a_gpu_is_not_counted_out_to_stages():
    options = ServeOptions(gpu_memory=1 << 30)
    refuse_with_holdings(options, stages=1)
    with pytest.raises(UserError, match="--gpu-memory does not go with --pipeline-parallel-size"):
        refuse_with_holdings(options, stages=2)


def test_rays_first_executor_never_calls_our_worker(tiny_quantized, capsys, monkeypatch):
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    flags = ("--memory", "24MiB", "--", "-tp", "2", "--distributed-executor-backend=ray")
    assert run("serve", tiny_quantized, *flags) == 2
    assert "calls the model past the worker" in capsys.readouterr().err


def test_an_executor_that_bypasses_the_worker_is_stopped_at_the_first_step():
    from types import SimpleNamespace

    from pagedweight.runtime.messages import StepPlan
    from pagedweight.serving.elastic.scheduler import ATTRIBUTE, ElasticScheduler

    sent, silent = SimpleNamespace(**{ATTRIBUTE: StepPlan(1)}), SimpleNamespace()
    scheduler: Any = SimpleNamespace(control=None)
    with pytest.raises(UserError, match="without the report of its ranks"):
        ElasticScheduler.update_from_output(scheduler, sent, silent)


def test_flags_are_read_as_vllm_reads_them():
    assert has(["--enable_expert_parallel"], "--enable-expert-parallel")
    assert not has(["serve", "--enable-expert-parallelism"], "--enable-expert-parallel")
    assert number(["--tensor_parallel_size=4"], "--tensor-parallel-size", "-tp") == 4
    assert number(["x", "-tp", "2"], "--tensor-parallel-size", "-tp") == 2
    assert number(["x"], "--tensor-parallel-size", "-tp") == 1
    with pytest.raises(UserError, match="is not a number"):
        number(["-tp"], "--tensor-parallel-size", "-tp")
