"""Steps that decode are told from those with prompts, and compared at equal running and bits."""

import json
from dataclasses import replace

import pytest

from pagedweight.bench import steps
from pagedweight.errors import UserError
from timelines import FIRST, write

RUNNING = 10


def stretch(samples, seconds, count=1, prompt=0, moved=0, bits=None):
    """What comes until the next line: `count` steps of RUNNING requests."""
    last = samples[-1]
    samples.append(
        replace(
            last,
            monotonic=last.monotonic + seconds,
            step=last.step + count,
            tokens_scheduled=last.tokens_scheduled + RUNNING * count + prompt,
            tokens_generated=last.tokens_generated + RUNNING * count,
            rows_lowered=last.rows_lowered + moved,
            bits=last.bits if bits is None else bits,
        )
    )


@pytest.fixture
def samples():
    """20 steps of 9 ms at 6 bits, one of 50 ms in which rows move, 10 of 7 ms at 3, and six times a
    step of 700 tokens, whose 60 ms the line after it has. An hour before, nobody was there."""
    made = [replace(FIRST, monotonic=100.0), replace(FIRST, monotonic=3700.0, running=RUNNING)]
    for _ in range(10):
        stretch(made, 0.018, 2)
    stretch(made, 0.050, moved=40, bits=3.02)
    for _ in range(10):
        stretch(made, 0.007)
    for _ in range(6):
        stretch(made, 0.007, prompt=690)
        stretch(made, 0.060)
    return made


def found_in(samples, tmp_path):
    from pagedweight.runtime.timeline import Timeline

    return steps.Stretches.of(Timeline.load(write(tmp_path / "a.jsonl", samples)))


def test_decoding_is_a_row_for_each_bits_and_running(samples, tmp_path):
    of = found_in(samples, tmp_path)
    assert steps.decode_rows(of) == [
        {"from": 8, "below": 12, "bits": 3.02, "running": 10, "steps": 16, "ms_p50": 7.0},
        {"from": 8, "below": 12, "bits": 6.0, "running": 10, "steps": 20, "ms_p50": 9.0},
    ]


def test_prompts_alone_in_their_step_are_what_is_beyond_decoding(samples, tmp_path):
    assert not steps.prompt_rows(found_in(samples, tmp_path))
    for _ in range(4):
        for _ in range(4):
            stretch(samples, 0.014, 2)
        stretch(samples, 0.014, 2, prompt=700)
        stretch(samples, 0.074, 3)
        for _ in range(4):
            stretch(samples, 0.014, 2)
    (row,) = steps.prompt_rows(found_in(samples, tmp_path))
    assert (row["from"], row["steps"]) == (513, 4)
    assert row["ms_p10"] == row["ms_p50"] == row["ms_p90"] == pytest.approx(60)


def test_a_span_is_divided_into_decoding_and_prompts(samples, tmp_path):
    of = found_in(samples, tmp_path)
    whole = steps.share(of, 0, 10)
    assert (whole["decode_steps"], whole["prompts_steps"]) == (30, 13)
    assert whole["decode_s"] == pytest.approx(0.25)
    assert whole["prompts_s"] == pytest.approx(0.05 + 6 * 0.067)
    assert (whole["generated"], whole["prompt_tokens"]) == (430, 6 * 690)
    assert steps.share(of, 0, 0.1)["decode_steps"] == 10


def test_the_command_divides_the_seconds_of_the_peak(samples, tmp_path, capsys):
    write(tmp_path / "paged-0.load.jsonl", samples)
    phases = [{"name": "calm", "seconds": 0.01}, {"name": "burst", "seconds": 0.1}]
    rows = [{"policy": "paged", "peak_s": 0.1}, {"policy": "marlin_int4", "peak_s": 0.1}]
    result = tmp_path / "pressure.json"
    result.write_text(json.dumps({"load": {"phases": phases}, "rows": rows}))
    out = tmp_path / "steps.json"
    steps.main([str(result), str(tmp_path), "--json", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["policy"] == "paged"
    assert row["peak"]["decode_steps"] == 12
    assert "paged: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("peak", "kept", "said"), [("top", ".", "no phase top"), ("burst", "x", "no timeline")]
)
def test_what_is_not_there_is_said(peak, kept, said, samples, tmp_path):
    write(tmp_path / "paged-0.load.jsonl", samples)
    result = tmp_path / "pressure.json"
    rows = [{"policy": "paged", "peak_s": 0.1}]
    phases = [{"name": "burst", "seconds": 1}]
    result.write_text(json.dumps({"load": {"phases": phases}, "rows": rows}))
    with pytest.raises(UserError, match=said):
        steps.main([str(result), str(tmp_path / kept), "--peak", peak])
