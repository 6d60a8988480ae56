"""`pagedweight top` and `pagedweight plot` on timelines."""

import pytest

from pagedweight.cli.main import main
from timelines import FIRST, burst, write


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


@pytest.fixture
def timeline(tmp_path):
    return write(tmp_path / "a.jsonl", burst(50, preempts=3))


def test_top_prints_one_frame(timeline, capsys):
    assert run("top", timeline, "--once") == 0
    said = capsys.readouterr().out
    last = burst(50, preempts=3)[-1]
    for part in (
        "tiny  elastic, step 50",
        f"{last.bits:.2f} of 6",
        "20.0 MiB",
        "weights 15.0 MiB",
        "reserve 1.0 MiB",
        f"0 held of {last.kv_usable} backed",
        "240 reachable",
        "3 preempted",
        f"raised {last.rows_raised} (52.0/s)",
        f"lowered {last.rows_lowered} (0.0/s)",
    ):
        assert part in said, said
    assert all(len(line) <= 110 for line in said.splitlines())


def test_the_bits_bar_is_as_long_as_the_bits(tmp_path, capsys):
    lengths = []
    for step in (0, 50):
        path = write(tmp_path / f"{step}.jsonl", burst(100)[: step + 1])
        assert run("top", path, "--once") == 0
        row = next(r for r in capsys.readouterr().out.splitlines() if r.startswith("bits"))
        lengths.append(row.count("█"))
    assert lengths == [48, 24]  # 6 and 3 of 6 bits


def test_top_needs_a_terminal_or_once(timeline, capsys):
    assert run("top", timeline) == 2
    assert "--once" in capsys.readouterr().err


@pytest.mark.parametrize(
    "where, said",
    [
        ("http://127.0.0.1:9", "http://127.0.0.1:9/metrics does not answer"),
        ("nowhere.jsonl", "there is no timeline nowhere.jsonl"),
    ],
)
def test_top_says_what_is_not_there(where, said, capsys):
    assert run("top", where, "--once") == 2
    assert said in capsys.readouterr().err


def test_top_refuses_an_interval_of_nothing(timeline):
    assert run("top", timeline, "--once", "--interval", "0") == 2


def test_plot_writes_a_picture(timeline, tmp_path, capsys):
    out = tmp_path / "a.png"
    assert run("plot", timeline, timeline, "--labels", "one,two", "-o", out) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{out}\n"


def test_plot_says_when_a_line_was_cut_short(timeline, tmp_path, capsys):
    timeline.write_bytes(timeline.read_bytes()[:-9])
    assert run("plot", timeline, "-o", tmp_path / "a.png") == 0
    assert "last line was cut short" in capsys.readouterr().err


def test_plot_refuses_and_writes_nothing(timeline, tmp_path, capsys):
    out = tmp_path / "b.png"
    assert run("plot", timeline, "--labels", "one,two", "-o", out) == 2
    assert run("plot", tmp_path / "none.jsonl", "-o", out) == 2
    assert run("plot", write(tmp_path / "c.jsonl", [FIRST]), "-o", out) == 2
    assert run("plot", timeline, "-o", tmp_path / "b.gif") == 2
    assert "names 2 timelines" in capsys.readouterr().err
    assert not out.exists()
