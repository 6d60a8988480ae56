"""`bench decode`: what each engine is given, and what is made of an engine's steps."""

from __future__ import annotations

import argparse
import json
import os
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from pagedweight.bench import decode
from pagedweight.bench.decode_engine import Job, Step, rates
from pagedweight.bench.models import MODELS, model_config
from pagedweight.cli.main import main
from pagedweight.core.geometry import LayerShape
from pagedweight.errors import UserError

SHAPE = LayerShape(60, 2048, 1408)


@pytest.mark.parametrize("name", decode.SHARES)
def test_a_mixed_plan_has_the_bytes_of_its_uniform_one(name):
    mixed = decode.engine_plan(name, 3, SHAPE)
    uniform = decode.engine_plan(name[-1], 3, SHAPE)
    sizes = [decode.plan_bytes(plan, SHAPE) for plan in (mixed, uniform)]
    assert sizes[1] * 0.999 < sizes[0] <= sizes[1]
    assert set(np.unique(mixed)) == set(decode.SHARES[name])
    assert (decode.engine_plan(name, 3, SHAPE) == mixed).all()


def test_bytes_of_a_plan_are_those_of_its_blocks():
    plan = np.int8([[[3, 4], [5, 6]]])
    blocks = LayerShape(2, 2048, 1408).blocks
    wanted = sum(blocks[k].resident_bytes(b) for k, b in ((0, 3), (1, 4), (0, 5), (1, 6)))
    assert decode.plan_bytes(plan, LayerShape(2, 2048, 1408)) == wanted


def _options(**changes) -> argparse.Namespace:
    given = {"model": "qwen1.5-moe", "layers": None, "batch": [1, 4], "sequence": 2048}
    given |= {"batched_tokens": 8192, "new_tokens": 128, "repeats": 2, "attention": None}
    return argparse.Namespace(**given | changes)


def test_engines_differ_in_nothing_but_their_weights(tmp_path):
    config, options = model_config("qwen1.5-moe"), _options()
    given = {n: decode.arguments(tmp_path, n, options, config) for n in decode.ENGINES}
    models = {name: arguments.pop("model") for name, arguments in given.items()}
    extra = {name: arguments.pop("additional_config", None) for name, arguments in given.items()}
    assert len({json.dumps(arguments) for arguments in given.values()}) == 1
    ours = [name for name in decode.ENGINES if name not in decode.PEERS]
    assert len({models[name] for name in ours}) == len({str(extra[name]) for name in ours}) == 1
    assert len(set(models.values())) == 3
    assert not any(extra[name] for name in decode.PEERS)


def test_each_engine_finds_its_own_plan(tmp_path):
    config, options = model_config("qwen1.5-moe", 2), _options(layers=2)
    for name in ("3", "mix4"):
        row = decode.describe(tmp_path, name, options, config)
        job = decode.job_of(tmp_path, name, options, config)
        plan = json.loads((job.directory / decode.PLAN).read_text())["bits"]
        stored = np.stack([plan["gate_up"], plan["down"]], axis=-1)
        assert (stored == decode.engine_plan(name, 2, SHAPE)).all()
        assert row["expert_gb"] == round(decode.plan_bytes(stored, SHAPE) / 1e9, 3)
        assert sum(row["blocks_at_bits"].values()) == stored.size
        assert date.fromisoformat(row["measured"]) <= date.today()


def test_an_attention_backend_is_for_every_engine_and_said_in_its_rows(tmp_path):
    config, options = model_config("gemma-4", 6), _options(layers=6, attention="TRITON_ATTN")
    for name in ("bf16", "mix4"):
        given = decode.arguments(tmp_path, name, options, config)
        assert given["attention_config"] == {"backend": "TRITON_ATTN"}
        assert decode.describe(tmp_path, name, options, config)["attention"] == "TRITON_ATTN"


@pytest.mark.parametrize("name", MODELS)
def test_int4_is_for_routed_experts_alone(name):
    config = model_config(name)
    quantization = decode.peer_config("marlin_int4", config)["quantization_config"]
    assert quantization["modules_in_block_to_quantize"] == ["experts"]
    assert quantization["group_size"] == (64 if name == "gemma-4" else 128)
    assert "quantization_config" not in decode.peer_config("bf16", config)


def test_rates_count_while_everyone_decodes():
    job = Job(Path(), {}, 10, [2], prompt_tokens=100, new_tokens=20, repeats=1)
    steps = [Step(0.0, 0, 0, 0), Step(1.0, 0, 1, 1), Step(2.0, 1, 2, 3)]
    steps += [Step(2.0 + 0.5 * n, 1 + n, 2 + n, 3 + 2 * n) for n in range(1, 19)]
    found = rates(steps, 2, job)
    assert found["prefill_tokens_s"] == 100  # 200 tokens in 2 s
    assert found["tokens_s"] == pytest.approx(4.0)  # 2 tokens a step of half a second
    assert found["step_ms"] == pytest.approx(500.0)
    assert found["timed_steps"] == 10  # from 8 tokens of the last to 19 of the first


def test_too_few_tokens_to_time_are_refused():
    job = Job(Path(), {}, 10, [1], prompt_tokens=100, new_tokens=9, repeats=1)
    steps = [Step(float(n), n, n, n) for n in range(10)]
    with pytest.raises(RuntimeError, match="ask for more tokens"):
        rates(steps, 1, job)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "decode"])
    assert ended.value.code == 2
    assert "needs one" in capsys.readouterr().err


def test_rows_are_written_as_they_come_and_engines_ended_with_the_last(tmp_path, monkeypatch):
    """An engine that stops in the middle has told what it had; nothing it started stays."""
    options = _options(engine=["4", "mix4"], layers=2, limit=20.0, together=2, json=tmp_path)
    options.add = False
    monkeypatch.setattr(decode, "about_machine", lambda: {"gpu": "a"})
    monkeypatch.setattr(decode, "prepare", lambda *_: None)
    monkeypatch.setattr(decode, "import_once", lambda: None)
    monkeypatch.setattr(decode.Engine.__init__, "__defaults__", (_two_rows_and_no_more,))
    seen = []
    write = decode.write
    monkeypatch.setattr(decode, "write", lambda *a: (seen.append(len(a[1])), write(*a)))
    decode.measure(tmp_path, options)
    assert seen == [1, 2, 3, 4, 5, 6]
    rows = json.loads((tmp_path / decode.RESULT).read_text())["rows"]
    assert [row.get("batch") for row in rows] == [1, 4, None] * 2
    assert [row["engine"] for row in rows] == ["4"] * 3 + ["mix4"] * 3
    assert rows[2]["failed"] == rows[5]["failed"] == "it broke"


def _two_rows_and_no_more(job, connection):
    os.setsid()
    connection.send(("started", 0.1))
    connection.recv()
    for batch in job.batches:
        connection.send({"batch": batch})
    connection.send("Traceback\nit broke\n")


def _measured(tmp_path, machine):
    rows = [
        {"model": "mixtral", "layers": 4, "engine": name, "batch": batch}
        for name in ("4", "bf16")
        for batch in (1, 4)
    ]
    rows.append({"model": "qwen1.5-moe", "layers": 4, "engine": "4", "batch": 1})
    (tmp_path / decode.RESULT).write_text(json.dumps({"machine": machine, "rows": rows}))
    return rows


def test_rows_of_other_engines_stay(tmp_path, monkeypatch):
    machine = {"gpu": "a"}
    monkeypatch.setattr(decode, "about_machine", lambda: machine)
    options = argparse.Namespace(model="mixtral", engine=["4"], json=tmp_path)
    assert decode.kept_rows(options, 4) == []
    rows = _measured(tmp_path, machine)
    assert decode.kept_rows(options, 4) == rows[2:]
    assert decode.kept_rows(options, 5) == rows


def test_rows_of_another_machine_are_not_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "about_machine", lambda: {"gpu": "b"})
    _measured(tmp_path, {"gpu": "a"})
    options = argparse.Namespace(model="mixtral", engine=["4"], json=tmp_path)
    with pytest.raises(UserError, match="measured elsewhere"):
        decode.kept_rows(options, 4)


def test_a_damaged_result_file_is_named(tmp_path):
    (tmp_path / decode.RESULT).write_text('{"rows": [')
    options = argparse.Namespace(model="mixtral", engine=["4"], json=tmp_path)
    with pytest.raises(UserError, match=rf"{decode.RESULT} is there and cannot be read .*move it"):
        decode.kept_rows(options, 4)
