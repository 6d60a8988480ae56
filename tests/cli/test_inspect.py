"""`pagedweight inspect` and the root of the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pagedweight import __version__
from pagedweight.cli.main import main
from quantized import make_quantized


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


@pytest.fixture
def out(tmp_path):
    make_quantized(tmp_path / "out", unseen=[(0, 2), (2, 1)])
    return tmp_path / "out"


def test_json(out, capsys):
    assert run("inspect", out, "--json", "--verify") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["linear_blocks"] == 3 * 4 * 2
    assert found["expert_weights"] == 3 * 4 * 3 * 64 * 48
    assert found["calibration"]["unseen_experts"] == [[0, 2], [2, 1]]
    layer = found["calibration"]["layers"][0]
    assert (layer["seen"], layer["tokens"], layer["least_share"]) == (3, 30, 0)
    assert layer["largest_share"] == pytest.approx(1 / 3)
    assert found["checks"] == {"structure": "passed", "checksums": "passed"}
    at_4 = next(level for level in found["levels"] if level["bits"] == 4)
    # gate_up: 96 x 64 is 6 x 1 tiles, down: 64 x 48 is 4 x 1; 160 rows of 16 centroids.
    assert at_4["plane_bytes"] == 12 * 4 * (6 + 4) * 128
    assert at_4["table_bytes"] == 12 * 160 * 16 * 2
    assert at_4["bits_per_weight"] == 8 * at_4["bytes"] / found["expert_weights"]
    disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    assert found["files"]["bytes"] == disk - (out / "pagedweight.json").stat().st_size
    stored = 12 * (6 * (6 + 4) * 128 + sum(160 * 2**b * 2 for b in range(2, 7)))
    assert 0 < found["files"]["expert_bytes"] - stored < 3 * 2048


def test_table(out, capsys):
    assert run("inspect", out) == 0
    shown = capsys.readouterr().out
    for words in ("24 linear blocks", "gate_up: 96 x 64", "10 of 12 experts", "0/2, 2/1"):
        assert words in " ".join(shown.split())
    assert "checksums not asked" in " ".join(shown.split())


def test_full_coverage_is_said(tmp_path, capsys):
    make_quantized(tmp_path / "out", layers=1)
    assert run("inspect", tmp_path / "out") == 0
    assert "all 4 experts were routed to" in capsys.readouterr().out


def test_a_changed_file_is_named_and_nothing_printed(out, capsys):
    path = out / "experts" / "layer-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)
    assert run("inspect", out, "--json") == 0
    capsys.readouterr()
    assert run("inspect", out, "--json", "--verify") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert "experts/layer-00002.safetensors" in shown.err


def test_user_errors_are_one_line_and_exit_code_2(tmp_path, capsys):
    assert run("inspect", tmp_path / "nothing") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"pagedweight: {tmp_path / 'nothing'} is not a folder\n"


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


def test_help_imports_nothing_heavy():
    """Commands import torch, vLLM and the rest when they run, not to show what they are."""
    code = (
        "import sys\nfrom pagedweight.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numba', 'matplotlib'} & set(sys.modules)\n"
        "print('heavy:', sorted(heavy))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "heavy: []" in result.stdout
    assert "inspect" in result.stdout
