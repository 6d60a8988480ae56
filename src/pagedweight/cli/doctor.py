"""`pagedweight doctor`: is everything there, and what to paste into a bug report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[OUT]", help="A quantized checkpoint: also start an engine on it."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, the text to paste in it.")
    ] = False,
) -> None:
    """Check versions, plugin, GPU, memory, kernels and folders. Exit code 1 when one is wrong.

    What is printed is plain text, made to be pasted into a bug report.
    """
    from rich.console import Console

    from pagedweight.serving.doctor.report import as_json as report_json
    from pagedweight.serving.doctor.report import as_text, diagnose, healthy

    console = Console(stderr=True)
    with console.status("") as status:
        findings = diagnose(path, lambda name: status.update(f"looking at {name}"))
    print(json.dumps(report_json(findings), indent=1) if as_json else as_text(findings))
    if not healthy(findings):
        raise typer.Exit(1)
