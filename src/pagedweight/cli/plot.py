"""`pagedweight plot`: the picture of one timeline, or of several beside each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pagedweight.errors import UserError


def command(
    timelines: Annotated[
        list[Path], typer.Argument(metavar="TIMELINE...", help="Files that --timeline wrote.")
    ],
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Picture: .png, .svg or .pdf.")
    ],
    labels: Annotated[
        str | None,
        typer.Option(help="A name for each timeline, separated by commas (default: file names)."),
    ] = None,
) -> None:
    """Draw KV demand, backed blocks, mean bits and preemptions over time."""
    from pagedweight.bench.plot import draw
    from pagedweight.checkpoint.result_file import check_picture
    from pagedweight.runtime.timeline import Timeline

    check_picture(out)
    names = _labels(labels, timelines)
    loaded = [Timeline.load(path) for path in timelines]
    for timeline in loaded:
        if timeline.truncated:
            print(f"{timeline.name}: the last line was cut short, left out", file=sys.stderr)
    draw(loaded, names, out)
    print(out)


def _labels(labels: str | None, timelines: list[Path]) -> list[str]:
    if labels is None:
        return [path.stem for path in timelines]
    names = [name.strip() for name in labels.split(",")]
    if len(names) != len(timelines):
        raise UserError(
            f"--labels names {len(names)} timelines ({labels}), but {len(timelines)} are given"
        )
    return names
