"""The load: what a seed draws, and what the command line may say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.bench.load import Load, Phase, draw, parse_lengths, python_topics
from pagedweight.errors import UserError

STREAM = list(range(1000))
PHASES = st.lists(
    st.builds(
        Phase, st.sampled_from("abc"), st.floats(0.5, 20), st.floats(0.0, 20), st.none(), st.none()
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=50)
@given(PHASES, st.integers(0, 5))
def test_requests_come_in_their_phases_and_in_order(phases, seed):
    load = Load((*phases, Phase("last", 5.0, 10.0, (7, 7), (3, 3))), (10, 20), (30, 40), seed)
    asks = draw(load, STREAM)
    assert all(a.at <= b.at for a, b in pairwise(asks))
    starts = [sum(p.seconds for p in load.phases[:n]) for n in range(len(load.phases))]
    for ask in asks:
        homes = [
            p
            for p, start in zip(load.phases, starts, strict=True)
            if p.name == ask.phase and start <= ask.at < start + p.seconds
        ]
        assert len(homes) == 1
        short = homes[0].prompt is not None
        assert len(ask.prompt) in (range(7, 8) if short else range(10, 21))
        assert ask.output in (range(3, 4) if short else range(30, 41))
        assert list(ask.prompt) == list(range(ask.prompt[0], ask.prompt[0] + len(ask.prompt)))
    assert draw(load, STREAM) == asks


def test_rates_are_what_was_asked_for():
    load = Load(
        (Phase("calm", 500, 1.0), Phase("none", 50, 0.0), Phase("burst", 100, 30.0)), (1, 1), (1, 1)
    )
    asks = draw(load, STREAM)
    counts = {name: sum(ask.phase == name for ask in asks) for name in ("calm", "none", "burst")}
    assert counts["none"] == 0
    assert abs(counts["calm"] - 500) < 5 * 500**0.5  # five deviations of a Poisson count
    assert abs(counts["burst"] - 3000) < 5 * 3000**0.5
    assert load.span("burst") == (550, 650)
    gaps = [b.at - a.at for a, b in pairwise(a for a in asks if a.phase == "burst")]
    spread = sum(gap > 1 / 30 for gap in gaps) / len(gaps)
    assert abs(spread - 0.368) < 0.05  # exponential: a share of 1/e exceeds the mean


def test_phases_on_the_command_line():
    assert Phase.parse("burst:25:6.5") == Phase("burst", 25, 6.5)
    assert Phase.parse("long:20:1:384-448:32") == Phase("long", 20, 1, (384, 448), (32, 32))
    assert parse_lengths("64-192") == (64, 192)


def test_when_the_load_rises_again():
    phases = (Phase("calm", 2, 1), Phase("burst", 3, 1), Phase("calm", 4, 1), Phase("long", 5, 1))
    assert Load(phases, (1, 1), (1, 1)).calm_after("burst") == 9
    assert Load(phases[:3], (1, 1), (1, 1)).calm_after("burst") == float("inf")
    assert Load(phases, (1, 1), (1, 1)).spans == [(0, 2), (2, 5), (5, 9), (9, 14)]


@pytest.mark.parametrize(
    "text", ["", "burst", "burst:3", "burst:x:1", ":3:1", "a:1:1:5-3", "a:1:1:0", "a:1:1:1:1:1"]
)
def test_what_is_no_phase(text):
    with pytest.raises(UserError, match="NAME:SECONDS:RATE"):
        Phase.parse(text)


@pytest.mark.parametrize("text", ["a:0:1", "a:-1:1", "a:1:-1"])
def test_phases_that_make_no_sense(text):
    with pytest.raises(UserError, match="above 0"):
        Phase.parse(text)


def test_a_load_that_cannot_be_drawn():
    with pytest.raises(UserError, match="a prompt of 2000 needs more"):
        draw(Load((Phase("a", 10, 10.0, (2000, 2000)),), (1, 1), (1, 1)), STREAM)
    with pytest.raises(UserError, match="no requests"):
        draw(Load((Phase("a", 10, 0.0),), (1, 1), (1, 1)), STREAM)
    with pytest.raises(UserError, match=r"no phase is called 'b': \['a'\]"):
        Load((Phase("a", 10, 1.0),), (1, 1), (1, 1)).span("b")


def test_every_python_has_the_text():
    text = python_topics()
    assert len(text) > 200_000
    assert "An assignment statement evaluates the expression list" in text.replace("\n", " ")
