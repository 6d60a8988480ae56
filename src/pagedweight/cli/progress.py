"""Progress of long commands: bars on a terminal, a plain line for each stage elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def staged_progress(stages: Mapping[str, str]) -> Iterator[Callable[[str, int, int], None]]:
    """A function (stage, units done since the last call, units in all; 0: not known) that shows
    progress on stderr while the block runs. `stages`: names to what is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stages[stage], total=total or None)
                if not console.is_terminal:
                    console.print(stages[stage])
            bar.advance(tasks[stage], done)

        yield tell
