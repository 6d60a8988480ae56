"""`pagedweight eval`: token perplexity, and KL to the unquantized model."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


class EngineName(StrEnum):
    """Values of --engine."""

    reference = "reference"
    vllm = "vllm"


class DeviceName(StrEnum):
    """Values of --device."""

    cpu = "cpu"
    cuda = "cuda"


def command(
    path: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A quantized checkpoint, or an unquantized one."),
    ],
    text: Annotated[
        str,
        typer.Option(help="Text file, or JSON lines with a 'text'; FILE:0-499 picks documents."),
    ],
    bits: Annotated[
        int | None, typer.Option(help="Bits of every linear block (default: the highest stored).")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Plan file with the bits of each linear block.")
    ] = None,
    engine: Annotated[
        EngineName,
        typer.Option(help="transformers with dequantized experts, or vLLM as it serves."),
    ] = EngineName.reference,
    model: Annotated[
        Path | None, typer.Option(help="The unquantized model: adds mean KL to it (reference).")
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens in a window.")] = 2048,
    windows: Annotated[
        int | None, typer.Option(help="Windows to draw from the text (default: all).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the drawing and of the intervals.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16 (default: float32; vLLM: the model's)."),
    ] = None,
    device: Annotated[DeviceName, typer.Option(help="Where the reference runs.")] = DeviceName.cpu,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure token perplexity on a text and, with --model, mean KL to the unquantized model."""
    from rich.console import Console
    from rich.progress import Progress

    from pagedweight.eval.evaluate import EvalOptions, evaluate
    from pagedweight.eval.windows import WindowChoice

    choice = WindowChoice(text, window, windows, seed)
    options = EvalOptions(path, choice, bits, plan, engine.value, model, dtype, device.value)
    console = Console(stderr=True)
    shown = console.is_terminal and engine is EngineName.reference  # vLLM draws a bar of its own
    with Progress(console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("windows", total=None)
        report = evaluate(
            options, lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        print(json.dumps(report))
    else:
        _show(report, Console(highlight=False))


def _show(report: dict[str, Any], console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console.print(
        f"[bold]{report['path']}[/bold] on {report['text']}: {report['windows']} windows of "
        f"{report['window']} tokens, {report['predictions']:,} predictions, "
        f"{report['engine']} engine, {report['dtype']}"
    )
    table = Table(box=SIMPLE_HEAD)
    for name in ("", "bits", "experts", "perplexity", "KL to model, nats"):
        table.add_column(name, justify="right" if name else "left")
    if model := report.get("model"):
        table.add_row("model", "", "", _estimate(model["perplexity"], 2), "")
    precision = report["precision"]
    kl = _estimate(report["kl"], 4) if "kl" in report else "needs --model"
    table.add_row(
        "quantized" if precision else "model",
        _bits(precision) if precision else "",
        f"{precision['expert_bytes'] / 1e6:.1f} MB" if precision else "",
        _estimate(report["perplexity"], 2),
        kl if precision else "",
    )
    console.print(table)
    console.print("in brackets: 95% interval, bootstrap over windows")


def _bits(precision: dict[str, Any]) -> str:
    """The level, or the mean of gate_up and of down."""
    if precision["uniform"]:
        return f"{precision['mean_bits']:.0f}"
    return f"{precision['gate_up']:.2f}, {precision['down']:.2f}"


def _estimate(found: dict[str, float], digits: int) -> str:
    return f"{found['mean']:.{digits}f} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]"
