"""`pagedweight eval --tasks` as a user runs it: local files, one real engine."""

from __future__ import annotations

import json
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pagedweight.checkpoint.plan import uniform_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.cli.main import main
from pagedweight.eval.evaluate import expert_bytes
from pagedweight.eval.tasks import TASKS
from pagedweight.eval.tasks.harness import TaskOptions, engine_arguments
from pagedweight.serving.launch import SCHEDULER, WORKER
from pagedweight.serving.options import ServeOptions

PROMPTS = {
    "passage_retrieval_en": "{context}\n\nWhich paragraph is this from?\n{input}\n",
    "multi_news": "News:\n{context}\n\nSummary:",
    "qmsum": "Transcript:\n{context}\n\nQuery: {input}\nAnswer:",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Seven problems and three long items, in the form of the published files."""
    folder = tmp_path_factory.mktemp("data")
    sums = [(f"What is {n} and {n + 1}?", str(2 * n + 1)) for n in range(7)]
    solved = [rf"It is $\boxed{{{total}}}$." for _, total in sums]
    _write(folder / "gsm8k/test.jsonl", [{"question": q, "answer": f"#### {a}"} for q, a in sums])
    _write(
        folder / "math500/test.jsonl",
        [
            {"problem": question, "solution": solution, "answer": answer}
            for (question, answer), solution in zip(sums, solved, strict=True)
        ],
    )
    long = "A city on the river was founded by traders. " * 400
    for name in ("passage_retrieval_wiki", "multi_news", "qmsum"):
        items = [
            {"_id": str(n), "input": "What?", "context": long, "answers": [f"Paragraph {n}"]}
            for n in range(3)
        ]
        _write(folder / f"long/{name}.jsonl", items)
    (folder / "long/dataset2prompt.json").write_text(json.dumps(PROMPTS))
    return folder


def _write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


@pytest.mark.vllm
@pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install '.[eval]'"
)
def test_all_tasks_run_on_one_engine_and_nothing_is_fetched(
    tiny_quantized, data, capfd, monkeypatch
):
    real = socket.getaddrinfo

    def only_here(host, *args, **kwargs):
        assert _local(host), f"asked for the network: {host}"
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", only_here)
    names = ",".join(TASKS)
    arguments = ("--tasks", names, "--data-dir", data, "--limit", 2, "--bits", 3, "--json")
    assert run("eval", tiny_quantized, *arguments) == 0
    found = json.loads(capfd.readouterr().out)
    assert [row["task"] for row in found["tasks"]] == list(TASKS)
    checkpoint = Checkpoint.open(tiny_quantized)
    assert found["precision"]["mean_bits"] == 3
    uniform = expert_bytes(checkpoint, uniform_plan(checkpoint, 3))
    assert found["precision"]["expert_bytes"] == uniform
    assert found["context"] == 2048
    for row in found["tasks"]:
        long = row["task"] in ("passage_retrieval_wiki", "multi_news", "qmsum")
        assert row["items"] == 2
        assert row["truncated"] == (2 if long else 0)
        assert row["items_in_file"] == (3 if long else 7 - row["examples_in_prompt"])
        assert 0 <= row["low"] <= row["value"] <= row["high"] <= 1
        assert row["value"] == sum(row["values"]) / 2
        assert ("LongBench" in row["caveat"]) == (
            row["task"] in ("passage_retrieval_wiki", "qmsum")
        )


def _local(host: object) -> bool:
    return host in (None, "localhost", "127.0.0.1", "::1", "0.0.0.0") or str(host)[0].isdigit()


def test_elastic_tasks_use_the_classes_that_serve(tiny_quantized, data, tmp_path):
    serve = ServeOptions(memory=24 << 20, policy="policy.json")
    options = TaskOptions(tiny_quantized, ("gsm8k",), data, serve=serve)
    found = engine_arguments(options, True, 2048, tmp_path / "run.jsonl")
    assert (found["scheduler_cls"], found["worker_cls"]) == (SCHEDULER, WORKER)
    assert found["kv_cache_memory_bytes"] == 24 << 20
    assert ServeOptions.of(found["additional_config"]) == ServeOptions(
        memory=24 << 20, policy="policy.json", timeline=str(tmp_path / "run.jsonl")
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--tasks", "gsm8k,mmlu"), "no task mmlu; there are gsm8k, math500"),
        (("--tasks", ","), "--tasks names no task"),
        (("--tasks", "gsm8k,gsm8k"), "gsm8k more than once"),
        (("--tasks", "gsm8k", "--limit", 0), "--limit 0"),
        (("--tasks", "gsm8k", "--bits", 7), "7 bits are not stored"),
        (("--tasks", "gsm8k", "--text", "x.txt"), "does not go with --text"),
        (("--tasks", "gsm8k", "--memory", "lots"), "'lots' is not a size"),
        (("--tasks", "gsm8k", "--policy-file", "p.json"), "together with --memory"),
        (("--limit", 2), "go with --tasks"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(tiny_quantized, data, capfd, args, message):
    where = ("--data-dir", data) if "--tasks" in args else ()
    assert run("eval", tiny_quantized, *args, *where) == 2
    captured = capfd.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_missing_data_are_named(tiny_quantized, tmp_path, capfd):
    assert run("eval", tiny_quantized, "--tasks", "gsm8k,qmsum", "--data-dir", tmp_path) == 2
    message = capfd.readouterr().err
    for name in ("gsm8k/test.jsonl", "long/qmsum.jsonl", "long/dataset2prompt.json"):
        assert name in message
    assert run("eval", tiny_quantized, "--tasks", "gsm8k") == 2
    assert "--tasks needs --data-dir" in capfd.readouterr().err
    assert run("eval", tiny_quantized) == 2
    assert "nothing to measure" in capfd.readouterr().err


def test_lm_eval_is_an_extra(tiny_quantized, data, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert run("eval", tiny_quantized, "--tasks", "gsm8k", "--data-dir", data) == 2
    assert "pip install 'pagedweight[eval]'" in capfd.readouterr().err
