"""A short load on one real server, and everything that is refused before one is started."""

from __future__ import annotations

import json

import pytest

from pagedweight.bench import pressure
from pagedweight.bench.service import serve
from pagedweight.errors import UserError

VLLM = (
    "--block-size", "32", "--max-model-len", "512", "--max-num-seqs", "16", "--enforce-eager",
)  # fmt: skip
POLICY = {
    "format": "pagedweight-policy",
    "format_version": 1,
    "offload_blocks": 8,
    "reload_blocks": 24,
}


@pytest.mark.vllm
def test_bits_give_way_to_a_burst_and_nobody_is_lost(tiny_quantized, tmp_path, capsys):
    policy, output = tmp_path / "policy.json", tmp_path / "pressure.json"
    policy.write_text(json.dumps(POLICY))
    phases = ("calm:1:3", "burst:1:30", "calm:4:1")
    pressure.main(
        [
            str(tiny_quantized), "--memory", "20.5MiB", "--policies", "paged", "--policy",
            str(policy), "--phases", *phases, "--prompt-tokens", "160-224", "--output-tokens",
            "64-96", "--keep", str(tmp_path / "kept"), "--output", str(output), "--", *VLLM,
        ]
    )  # fmt: skip
    written = json.loads(output.read_text())
    (row,) = written["rows"]
    assert row["policy"] == "paged"
    assert row["requests"] == written["load"]["requests"] > 10
    assert row["lost"] == row["preemptions"] == row["above_floor"] == 0
    assert row["start_bits"] == 6.0
    assert row["lowest_bits"] < 5.5
    assert row["lowest_bits"] < row["mean_bits"] < 6.0
    assert row["kv_blocks_most"] > row["kv_blocks_start"]
    assert row["bits_back_s"] is not None
    assert row["copied_bytes"] > 0
    assert row["peak"]["ttft_p50"] > 0
    assert row["all"]["itl_p99"] >= row["all"]["itl_p50"] > 0
    assert str(tmp_path) not in output.read_text()
    assert "paged" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"paged-0.log", "paged-0.jsonl"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--policies", "dynamic"], "policy 'dynamic' is neither paged nor static"),
        (["--policies", "static"], "policy 'static' is neither"),
        (["--peak", "rush"], "no phase is called 'rush'"),
        (["--phases", "burst"], "NAME:SECONDS:RATE"),
        (["--prompt-tokens", "9-3"], "ranges such as 64-192"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--memory", "much"], "is not a size"),
    ],
)
def test_what_is_refused_before_a_server_starts(tiny_quantized, tmp_path, arguments, message):
    output = tmp_path / "pressure.json"
    given = [str(tiny_quantized), "--memory", "20MiB", "--output", str(output), *arguments]
    with pytest.raises(UserError, match=message):
        pressure.main(given)
    assert not output.exists()


def test_a_server_that_does_not_start_says_why(tmp_path):
    with (
        pytest.raises(UserError, match=r"the server ended with 2: .*not a folder"),
        serve(tmp_path / "nothing", tmp_path / "log", (), ()),
    ):
        raise AssertionError("came up")


def test_policies_become_flags_of_serve(tmp_path):
    trial = pressure.Trial(
        tmp_path, 1 << 20, pressure.WARM_UP, "a", (), (), tmp_path / "p.json", (), tmp_path, True
    )
    common = ["--memory", "1048576", "--timeline"]
    assert pressure.flags_of("static4", trial) == [
        *common, str(tmp_path / "static4-0.jsonl"), "--bits", "4",
    ]  # fmt: skip
    assert pressure.flags_of("paged", trial, 2) == [
        *common, str(tmp_path / "paged-2.jsonl"), "--policy", str(tmp_path / "p.json"),
        "--trace", str(tmp_path / "paged-2.trace"),
    ]  # fmt: skip
