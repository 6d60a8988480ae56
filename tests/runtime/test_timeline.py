"""The timeline's format: what is written is read, what is cut short is left out and said so."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.errors import UserError
from pagedweight.runtime.timeline import (
    LineReader,
    Sample,
    Timeline,
    TimelineWriter,
    check_writable,
)
from timelines import FIRST, HEADER, burst, write

VALUES = {
    "int": st.integers(0, 1 << 62),
    "float": st.floats(-1e9, 1e9).map(lambda v: round(v, 3)),
    "str": st.sampled_from(["none", "offload", "reload", "protect"]),
}
SAMPLES = st.builds(
    Sample,
    **{f.name: VALUES[str(f.type)] for f in fields(Sample) if "damage" not in f.name},
    plan_damage=st.floats(-1e3, 1e3).map(lambda v: float(f"{v:.6g}")),
    damage=st.floats(0, 1e9).map(lambda v: float(f"{v:.6g}")),
    damage_taken=st.floats(0, 1e9).map(lambda v: float(f"{v:.6g}")),
)


@given(st.lists(SAMPLES, max_size=4))
def test_what_is_written_is_read(tmp_path_factory, samples):
    path = write(tmp_path_factory.mktemp("timeline") / "a.jsonl", samples)
    found = Timeline.load(path)
    assert found.header == HEADER
    assert found.samples == tuple(samples)
    assert not found.truncated


def test_numbers_are_kept_to_what_they_mean(tmp_path):
    written = replace(FIRST, time=1.23456789, bits=4.123456, damage=1234.5678)
    (found,) = Timeline.load(write(tmp_path / "a.jsonl", [written])).samples
    assert (found.time, found.bits, found.damage) == (1.235, 4.1235, 1234.57)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    path = write(tmp_path_factory.mktemp("timeline") / "three.jsonl", burst(2))
    return path.read_bytes()


@given(st.data())
def test_a_line_cut_short_anywhere_is_left_out(tmp_path_factory, three, data):
    lines = three.splitlines(keepends=True)
    cut = data.draw(st.integers(len(lines[0]), len(three)))
    path = tmp_path_factory.mktemp("timeline") / "cut.jsonl"
    path.write_bytes(three[:cut])
    found = Timeline.load(path)
    assert found.samples == tuple(burst(2))[: three[:cut].count(b"\n") - 1]
    assert found.truncated == (cut > 0 and not three[:cut].endswith(b"\n"))


def test_a_reader_goes_on_where_the_writer_was(tmp_path):
    writer = TimelineWriter(tmp_path / "a.jsonl", HEADER)
    reader = LineReader(tmp_path / "a.jsonl")
    assert list(reader.more()) == []
    samples = burst(3)
    for sample in samples[:2]:
        writer.write(sample)
    writer.flush()
    assert list(reader.more()) == samples[:2]
    with (tmp_path / "a.jsonl").open("a") as half:  # as a buffer that was written in two pieces
        line = json.dumps({f.name: getattr(samples[2], f.name) for f in fields(Sample)})
        half.write(line[:40])
        half.flush()
        assert list(reader.more()) == []
        assert reader.cut == line[:40]
        half.write(line[40:] + "\n")
    (found,) = reader.more()
    assert found.step == samples[2].step
    writer.close()
    reader.close()


def test_columns(tmp_path):
    samples = burst(20)
    found = Timeline.load(write(tmp_path / "a.jsonl", samples))
    assert np.array_equal(found.column("kv_usable"), [s.kv_usable for s in samples])
    assert found.column("running").dtype == np.float64


def _changed(text, **changes):
    head, rest = text.split("\n", 1)
    return json.dumps(json.loads(head) | changes) + "\n" + rest


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda text: "", "no header line"),
        (lambda text: "\x00\x01\n" + text, "no header line"),
        (lambda text: "[1]\n" + text, "no header line"),
        (lambda text: _changed(text, format="else"), "not a timeline"),
        (lambda text: _changed(text, format_version=99), "version 99"),
        (lambda text: _changed(text, budget={}), "header is damaged"),
        (lambda text: text.replace('"running":0', '"walking":0', 1), "line 2, is damaged"),
        (lambda text: text.replace('"step":1,', '"step" 1,'), "line 3, is damaged"),
    ],
)
def test_damage_is_named(tmp_path, spoil, said):
    path = write(tmp_path / "a.jsonl", burst(3))
    path.write_text(spoil(path.read_text()))
    with pytest.raises(UserError, match=said):
        Timeline.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        Timeline.load(tmp_path / "nowhere.jsonl")


def test_a_place_that_cannot_be_written_is_refused_and_nothing_is_made(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        check_writable(tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        TimelineWriter(tmp_path / "none" / "a.jsonl", HEADER)
    check_writable(tmp_path / "fine.jsonl")
    assert list(tmp_path.iterdir()) == []
