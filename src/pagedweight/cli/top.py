"""`pagedweight top`: bits, memory, KV blocks and queue of a running server, live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from pagedweight.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from pagedweight.runtime.watch import Source


PLAIN_WIDTH = 110
"""Columns where the output is no terminal."""


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="[URL|TIMELINE]", help="A server's address, or a file that --timeline writes."
        ),
    ] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    engine: Annotated[
        int, typer.Option(help="Which engine of a data-parallel server (a timeline has one).")
    ] = 0,
) -> None:
    """Show what a server with --memory does with its bits and its KV cache."""
    from rich.console import Console

    from pagedweight.runtime.watch import source_of

    if interval <= 0:
        raise UserError(f"--interval {interval} must be above 0 seconds")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    found = source_of(source, engine)
    if once:
        _once(found, console, interval)
    elif console.is_terminal:
        _live(found, console, interval)
    else:
        raise UserError("top needs a terminal; --once prints one frame anywhere")


def _once(source: Source, console: Console, interval: float) -> None:
    """One frame; a server is asked twice, so that there are rates."""
    from pagedweight.cli.top_view import frame

    view = source.read()
    if source.history.rate("step") is None:
        time.sleep(interval)
        view = source.read()
    console.print(frame(view, source.history, time.time()))


def _live(source: Source, console: Console, interval: float) -> None:
    """Frames until Ctrl-C. A server that stops answering is asked again, with its last frame up."""
    from rich.live import Live

    from pagedweight.cli.top_view import frame

    view, note = source.read(), ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(frame(view, source.history, time.time(), note), refresh=True)
                time.sleep(interval)
                try:
                    view, note = source.read(), ""
                except UserError as error:
                    note = str(error)
        except KeyboardInterrupt:
            return
