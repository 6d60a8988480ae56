"""`pagedweight bench` lists and runs benchmarks without importing the others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pagedweight.bench
from pagedweight.cli.bench import benchmarks
from pagedweight.cli.main import app, main


def test_every_benchmark_is_listed_with_its_question(capsys):
    folder = Path(pagedweight.bench.__file__).parent
    runnable = {p.stem for p in folder.glob("*.py") if "\ndef main(" in p.read_text()}
    assert set(benchmarks()) == runnable >= {"planner", "pressure", "quantizer"}
    with pytest.raises(SystemExit) as ended:
        main(["bench"])
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    for name, question in benchmarks().items():
        assert len(question) > 20
        assert f"{name} " in shown
        assert question in shown


def test_listing_imports_none_of_them():
    code = (
        "import sys\nfrom pagedweight.cli.main import app\n"
        "app(args=['bench'], standalone_mode=False)\n"
        "assert not {'torch', 'vllm', 'numba'} & set(sys.modules), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_benchmark_gets_its_own_arguments_and_help(monkeypatch, capsys):
    from pagedweight.bench import planner

    called = []
    monkeypatch.setattr(planner, "main", lambda arguments=None: called.append(arguments))
    app(args=["bench", "planner", "--steps", "3", "--", "--x"], standalone_mode=False)
    assert called == [["--steps", "3", "--", "--x"]]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "pressure", "--help"])
    assert ended.value.code == 0
    assert "pagedweight bench pressure" in capsys.readouterr().out


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "presure"])
    assert ended.value.code == 2
    assert "there is no benchmark 'presure'; there are" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("synthetic", "qwen1.5-moe", "out", "--layers", "0"),
        ("decode", "--batch", "1", "-4"),
        ("decode", "--limit", "nan"),
        ("movement", "--gib", "inf"),
        ("kernel", "--batch", "two"),
        ("groups", "--batch", "0"),
    ],
)
def test_numbers_are_at_least_one(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert f"{arguments[-1]!r} is not a" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("name", ["decode", "groups", "kernel", "movement", "shared_expert"])
def test_what_needs_a_gpu_says_so(capsys, name):
    with pytest.raises(SystemExit) as ended:
        main(["bench", name])
    assert ended.value.code == 2
    assert re.fullmatch(
        rf"pagedweight: bench {name} .*needs (a GPU|one)\n", capsys.readouterr().err
    )


def test_synthetic_writes_into_nothing_but_an_empty_folder(capsys, tmp_path):
    (tmp_path / "file").write_text("kept")
    for out in (tmp_path, tmp_path / "file"):
        with pytest.raises(SystemExit) as ended:
            main(["bench", "synthetic", "qwen1.5-moe", str(out), "--layers", "1"])
        assert ended.value.code == 2
        assert f"{out} is not an empty folder" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"
