"""What `make demo` says of runs, and that it does not call a broken story a success."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from pagedweight.bench.client import Answer
from pagedweight.bench.load import Ask
from pagedweight.bench.outcome import outcome
from pagedweight.bench.pressure import Run
from pagedweight.runtime.timeline import Timeline
from timelines import FIRST, HEADER, burst

ROOT = Path(__file__).resolve().parents[2]
DAMAGE = {"paged": 0.004, "static6": 0.001, "static3": 0.02}


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answers_of(demo):
    start, _ = demo.CROWD.span("burst")
    found = []
    for at, phase in ((0.1, "calm"), (start + 0.1, "burst"), (start + 1.0, "burst")):
        sent = 148.0 + at  # the burst comes just before bits fall in the timeline
        ask = Ask(at, phase, (1, 2), 4)
        found.append(Answer(ask, sent, (sent + 0.2, sent + 0.3), 4, "text", ""))
    return found


def run_of(demo, name, samples, preemptions):
    answers = answers_of(demo)
    timeline = Timeline(name, HEADER, tuple(samples), truncated=False)
    found = outcome(demo.CROWD, "burst", answers, timeline, preemptions)
    return Run(name, 20.0, found, tuple(answers), timeline)


def still(bits, preempts):
    return [
        replace(one, bits=bits, kv_usable=64, preemptions=one.preemptions)
        for one in burst(100, preempts)
    ]


@pytest.fixture
def runs(demo):
    return {
        "paged": run_of(demo, "paged", burst(100), 0),
        "static6": run_of(demo, "static6", still(6.0, 30), 30),
        "static3": run_of(demo, "static3", still(3.0, 0), 0),
    }


def test_a_story_that_holds(demo, runs):
    assert list(demo.faults_of(runs, DAMAGE)) == []


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("paged", {"preemptions": 2}, "paged preempted 2 times"),
        ("paged", {"bits_back_s": None}, "did not come back"),
        ("paged", {"lowest_bits": 5.4}, "the crowd was too small"),
        ("static6", {"preemptions": 0}, "preempted nobody"),
    ],
)
def test_a_story_that_does_not(demo, runs, name, change, says):
    runs[name] = replace(runs[name], outcome=replace(runs[name].outcome, **change))
    (fault,) = demo.faults_of(runs, DAMAGE)
    assert says in fault


def test_a_lost_request_and_wrong_damage_are_faults(demo, runs):
    gone = replace(runs["static3"].answers[1], fault="Bad Gateway")
    lost = replace(runs["static3"].outcome, lost=1)
    runs["static3"] = replace(runs["static3"], answers=(gone,), outcome=lost)
    first, second = demo.faults_of(runs, {**DAMAGE, "paged": 0.03})
    assert "3 bits fixed lost 1 requests: Bad Gateway" in first
    assert "not between" in second


def test_the_tables_show_the_runs(demo, runs, capsys):
    demo.show_story(runs["paged"])
    demo.show_comparison(runs, DAMAGE)
    shown = capsys.readouterr().out
    before, peak, after = (
        next(line for line in shown.splitlines() if line.strip().startswith(name))
        for name in ("before", "at the peak", "after")
    )
    assert before.split()[1] == "6.00"
    assert peak.split()[3:6] == ["3.00", "15.0", "MiB"]
    assert peak.split()[6] == "164"
    assert after.split()[1] == "6.00"
    fixed = next(line for line in shown.splitlines() if line.strip().startswith("6 bits fixed"))
    assert fixed.split()[3:5] == ["0", "30"]
    assert fixed.split()[-1] == "0.0010"


def test_warm_up_is_not_part_of_the_story(demo, runs):
    samples = demo.since_first_request(runs["paged"]).samples
    assert FIRST in runs["paged"].timeline.samples
    assert FIRST not in samples
    assert samples[0].step == 1
