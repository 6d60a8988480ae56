"""A short load on one real server, and everything that is refused before one is started."""

from __future__ import annotations

import json
import sys

import pytest

from pagedweight.bench import pressure
from pagedweight.bench.contestants import Budget
from pagedweight.bench.models import model_config
from pagedweight.bench.reference_damage import damage_of_levels
from pagedweight.bench.service import Server, serve
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.errors import UserError
from pagedweight.runtime.timeline import Timeline
from pagedweight.serving.elastic.gpu_budget import memory_within
from pagedweight.serving.plans import calibration_of

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
    assert written["not_measured"] == []
    damage = {int(bits): value for bits, value in written["damage_of_static"].items()}
    assert sorted(damage) == [2, 3, 4, 5, 6]
    assert damage[2] > damage[3] > damage[4] > damage[5] > damage[6] == 0
    assert 0 < row["mean_damage"] < row["most_damage"] < damage[2]
    assert row["damage_over_static5"] == pytest.approx(row["mean_damage"] / damage[5], rel=1e-2)
    integral = row["mean_damage"] * row["measured_s"]
    every = row["static5_if_once_in_s"]  # written to a tenth of a second
    assert every == pytest.approx(integral / damage[5], rel=1e-2, abs=0.06)
    assert [phase["name"] for phase in row["phases"]] == ["calm", "burst", "calm"]
    assert sum(phase["requests"] for phase in row["phases"]) == row["requests"]
    assert row["peak"]["ttft_p50"] > 0
    assert row["all"]["itl_p99"] >= row["all"]["itl_p50"] > 0
    assert str(tmp_path) not in output.read_text()
    assert "paged" in capsys.readouterr().out
    kept = tmp_path / "kept"
    names = {"paged-0.log", "paged-0.jsonl", "paged-0.load.jsonl"}
    assert {path.name for path in kept.iterdir()} == names
    whole, part = (Timeline.load(kept / f"paged-0{end}.jsonl") for end in ("", ".load"))
    assert 0 < len(part.samples) < len(whole.samples)
    assert part.samples[-1] == whole.samples[-1]
    assert part.samples[0].running == 0, "the warm-up is no part of it"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--policies", "dynamic"], "policy 'dynamic' is neither paged nor static"),
        (["--policies", "static"], "policy 'static' is neither"),
        (["--peak", "rush"], "no phase is called 'rush'"),
        (["--phases", "burst"], "NAME:SECONDS:RATE"),
        (["--prompt-tokens", "9-3"], "ranges such as 64-192"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--together", "0"], "--together is 0"),
        (["--gpu-memory", "1GiB"], "give one of --memory and --gpu-memory"),
        (["--gpu-reserve", "1GiB"], "together with --gpu-memory"),
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


def test_of_a_long_log_the_first_error_is_shown(tmp_path):
    said = (
        "import sys\nprint('WARNING: Errors may follow')\nprint('(Worker) ValueError: no room')\n"
    )
    said += "print('at work\\n' * 30)\nprint('RuntimeError: see above')\nsys.exit(3)"
    server = Server([sys.executable, "-c", said], tmp_path / "log")
    with pytest.raises(UserError, match=r"ended with 3: \(Worker\) ValueError: no room / \.\.\. /"):
        server.ready()


def test_a_benchmark_without_all_its_servers_is_not_a_success(
    tiny_quantized, tmp_path, monkeypatch
):
    monkeypatch.setattr(pressure, "run_all", lambda *rest: [])
    output = str(tmp_path / "pressure.json")
    given = [str(tiny_quantized), "--memory", "20.5MiB", "--output", output]
    with pytest.raises(SystemExit, match="not measured, as said above: static4, paged"):
        pressure.main([*given, "--policies", "static4", "paged"])


def test_a_server_that_takes_too_long_is_given_up(tmp_path):
    server = Server([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    try:
        with pytest.raises(UserError, match="did not come up in time"):
            server.ready(0.5)
    finally:
        server.end()


def test_what_fixed_bits_cost_is_what_their_timeline_says(tiny_quantized):
    checkpoint = Checkpoint.open(tiny_quantized)
    damage = calibration_of(checkpoint).sensitivity.sum((0, 1, 2))
    found = damage_of_levels(tiny_quantized)
    assert [*found] == [*checkpoint.bits]
    assert [*found.values()] == pytest.approx((damage - damage[-1]).tolist(), rel=1e-3)


def trial_at(folder, budget, **more):
    return pressure.Trial(
        folder, budget, pressure.WARM_UP, "a", (), (), folder / "p.json", ("--seed", "0"), folder,
        **more,
    )  # fmt: skip


def test_policies_become_flags_of_serve(tmp_path):
    (tmp_path / "tokenizer.json").touch()
    trial = trial_at(tmp_path, Budget(1 << 20), trace=True)
    common = ["serve", str(tmp_path), "--memory", "1048576", "--timeline"]
    assert pressure.command_of("static4", trial)[3:] == [
        *common, str(tmp_path / "static4-0.jsonl"), "--bits", "4", "--", "--seed", "0",
    ]  # fmt: skip
    assert pressure.command_of("paged", trial, 2)[3:] == [
        *common, str(tmp_path / "paged-2.jsonl"), "--policy", str(tmp_path / "p.json"),
        "--trace", str(tmp_path / "paged-2.trace"), "--", "--seed", "0",
    ]  # fmt: skip


def test_vllms_own_model_gets_what_its_experts_leave_for_kv(tmp_path):
    config = model_config("qwen1.5-moe")
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    gpu = 48 << 30
    trial = trial_at(tmp_path, Budget(memory_within(config, (2, 3, 4, 5, 6), gpu, None), gpu))
    left = {}
    for name, bytes_a_weight in (("bf16", 2), ("marlin_int4", 0.515625)):
        command = pressure.command_of(name, trial)
        assert command[3:5] == ["serve", str(tmp_path / name)]
        assert command[-3:] == ["--skip-tokenizer-init", "--seed", "0"]
        left[name] = int(command[command.index("--kv-cache-memory-bytes") + 1])
        weights = 24 * 60 * 3 * 2048 * 1408
        assert left[name] == trial.budget.memory - int(weights * bytes_a_weight)
        written = json.loads((tmp_path / name / "config.json").read_text())
        assert ("quantization_config" in written) == (name != "bf16")
    assert "--gpu-memory" in pressure.command_of("paged", trial)
    kept = pressure.command_of("static6", trial_at(tmp_path, Budget(1 << 30, gpu, 2 << 30)))
    assert kept[5:9] == ["--gpu-memory", str(gpu), "--gpu-reserve", str(2 << 30)]
    with pytest.raises(UserError, match="bf16: its experts take"):
        pressure.command_of("bf16", trial_at(tmp_path, Budget(16 << 30)))


def test_of_servers_side_by_side_one_that_fails_is_said_and_the_others_are_measured(
    tmp_path, monkeypatch, capsys
):
    happened = []

    class Server:
        def __init__(self, command, log):
            self.name = command[0]
            happened.append(("start", self.name))

        def ready(self, seconds):
            if self.name == "static4":
                raise UserError("it does not come up")
            return self.name

        def stop(self):
            happened.append(("stop", self.name))

        def end(self):
            happened.append(("end", self.name))

    names = ["paged", "static4", "static6", "static3"]
    monkeypatch.setattr(pressure, "Server", Server)
    monkeypatch.setattr(pressure, "command_of", lambda name, trial, number: [name])
    monkeypatch.setattr(pressure, "_ask", lambda *args: happened.append(("ask", args[1])))

    def measure(service, name, *rest):
        happened.append(("measure", name))
        if name == "static6":
            raise ConnectionRefusedError("it ended under load")
        return [], 0

    monkeypatch.setattr(pressure, "_measure", measure)
    monkeypatch.setattr(pressure, "_run_of", lambda name, *rest: name)
    trial, told = trial_at(tmp_path, Budget(1 << 20)), []
    assert pressure.run_all(trial, names, 1, told.append, together=4) == ["paged", "static3"]
    assert told == ["paged", "static3"]
    assert happened == [
        *(("start", name) for name in names),
        *(("ask", name) for name in ("paged", "static6", "static3")),
        *(("measure", name) for name in ("paged", "static6", "static3")),
        *(("stop", name) for name in names),
        *(("end", name) for name in reversed(names)),
    ]  # fmt: skip
    said = capsys.readouterr().err
    assert "static4: it does not come up" in said
    assert "static6: it ended under load" in said
