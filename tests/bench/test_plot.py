"""The picture: what it is computed from, and that every part of it is in the file."""

from dataclasses import replace

import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from pagedweight.bench.plot import BLUE, GREY, INK, PALE, RED, SHADE, Series, draw
from pagedweight.errors import UserError
from pagedweight.runtime.timeline import Timeline
from timelines import FIRST, HEADER, burst

STATIC = replace(HEADER, precision="static", reachable=64)


def timeline(samples, header=HEADER, name="a.jsonl"):
    return Timeline(name, header, tuple(samples), truncated=False)


def still(samples):
    fixed = {"bits": 6.0, "kv_usable": 64, "rows_lowered": 0, "rows_raised": 0, "plan": "none"}
    return [replace(sample, **fixed) for sample in samples]


def test_time_starts_at_the_first_request_and_ends_with_the_last_change():
    samples = burst(100)
    late = [replace(samples[-1], step=101 + n, monotonic=1e4 + n) for n in range(3)]
    series = Series.of(timeline([*samples, *late]), "a")
    assert series.times[0] == 0
    assert series.end == pytest.approx(9.9)


def test_means_are_over_time_not_over_samples():
    one = replace(FIRST, running=1)
    samples = [
        replace(one, monotonic=0.0, bits=6.0),
        replace(one, monotonic=9.0, bits=2.0),
        replace(one, monotonic=9.5, bits=2.0),
        replace(FIRST, monotonic=10.0, bits=2.0),
    ]
    assert Series.of(timeline(samples), "a").mean("bits") == pytest.approx(5.6)


def test_rates_add_up_to_the_total():
    series = Series.of(timeline(burst(100)), "a")
    edges, rate = series.rate("tokens_generated")
    assert rate @ np.diff(edges) == pytest.approx(series.total("tokens_generated")) == 396
    assert rate[10:].min() == pytest.approx(40, rel=0.2)


def test_phases_are_where_bits_fall_and_rise():
    (down, fall_from, fall_to), (up, rise_from, rise_to) = Series.of(
        timeline(burst(100)), "a"
    ).phases()
    assert (down, up) == ("offload", "reload")
    assert [fall_from, fall_to, rise_from] == pytest.approx([2.4, 4.9, 7.4], abs=0.15)
    assert rise_to == pytest.approx(9.9, abs=0.05)
    assert Series.of(timeline(still(burst(100))), "a").phases() == []


def pixels(path, color):
    """How many pixels of the picture have just this colour."""
    image = matplotlib.image.imread(path)[..., :3]
    return int((np.abs(image - to_rgb(color)).max(axis=-1) < 0.02).sum())


def shaded(kind):
    color, alpha = SHADE[kind]
    return tuple(alpha * part + 1 - alpha for part in to_rgb(color))


def test_a_picture_shows_its_lines_and_phases(tmp_path):
    path = tmp_path / "a.png"
    draw([timeline(burst(100, preempts=2))], ["paged"], path)
    for color in (BLUE, GREY, INK, PALE, RED):
        assert pixels(path, color) > 300, color
    for kind in SHADE:
        assert pixels(path, shaded(kind)) > 3000, kind


def test_static_precision_has_no_phases(tmp_path):
    draw([timeline(burst(100))], ["paged"], tmp_path / "paged.png")
    draw([timeline(still(burst(100)), STATIC)], ["static"], tmp_path / "static.png")
    for kind in SHADE:
        assert pixels(tmp_path / "static.png", shaded(kind)) < 300
        assert pixels(tmp_path / "paged.png", shaded(kind)) > 3000


def test_timelines_stand_beside_each_other(tmp_path):
    both = [timeline(burst(100)), timeline(still(burst(120, preempts=9)), STATIC, "b.jsonl")]
    draw(both[:1], ["paged"], tmp_path / "one.png")
    draw(both, ["paged", "static"], tmp_path / "two.png")
    one, two = (matplotlib.image.imread(tmp_path / f"{n}.png").shape for n in ("one", "two"))
    assert two[0] == one[0]
    assert two[1] > 1.5 * one[1]


@pytest.mark.parametrize("name", ["a.svg", "a.pdf"])
def test_other_formats(tmp_path, name):
    draw([timeline(burst(10))], ["paged"], tmp_path / name)
    assert (tmp_path / name).stat().st_size > 5000


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(UserError, match="pictures are written as"):
        draw([timeline(burst(10))], ["a"], tmp_path / "a.bmp")
    with pytest.raises(UserError, match="there is no folder"):
        draw([timeline(burst(10))], ["a"], tmp_path / "none" / "a.png")
    with pytest.raises(UserError, match="no request in it"):
        draw([timeline([FIRST, FIRST])], ["a"], tmp_path / "a.png")
    with pytest.raises(UserError, match="no request in it"):
        draw([timeline([])], ["a"], tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
