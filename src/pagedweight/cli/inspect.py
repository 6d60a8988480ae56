"""`pagedweight inspect`: what a checkpoint holds and whether it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from pagedweight.checkpoint.reader import Checkpoint


def command(
    path: Annotated[Path, typer.Argument(metavar="OUT", help="A quantized checkpoint's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare its checksum.")
    ] = False,
) -> None:
    """Show blocks, bytes at every precision, calibration coverage, tables and checks."""
    from rich.console import Console

    from pagedweight.checkpoint.reader import Checkpoint
    from pagedweight.checkpoint.summary import summarize

    checkpoint = Checkpoint.open(path)
    summary = summarize(checkpoint)
    summary["checks"] = {"structure": "passed", "checksums": "not asked (--verify)"}
    if verify:
        _verify(checkpoint, Console(stderr=True))
        summary["checks"]["checksums"] = "passed"
    if as_json:
        print(json.dumps(summary, indent=1))
    else:
        _show(summary, Console(highlight=False))


def _verify(checkpoint: Checkpoint, console: Console) -> None:
    from rich.progress import Progress

    from pagedweight.errors import CheckpointError, listing

    total = sum(record.bytes for record in checkpoint.manifest.files.values())
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("checksums", total=total)
        changed = checkpoint.verify(lambda done: bar.advance(task, done))
    if changed:
        raise CheckpointError(
            f"{checkpoint.path}: files differ from the manifest's checksums: {listing(changed)}"
        )


def _show(summary: dict[str, Any], console: Console) -> None:
    layers, calibration, files = summary["moe_layers"], summary["calibration"], summary["files"]
    console.print(
        f"[bold]{summary['path']}[/bold]: {summary['architecture']}, "
        f"from {summary['source'].get('name')} ({_size(summary['source'].get('bytes', 0))})"
    )
    console.print(
        f"{summary['linear_blocks']:,} linear blocks: {len(layers)} MoE layers of "
        f"{summary['num_hidden_layers']}, {summary['experts']} experts (top {summary['top_k']}), "
        f"gate_up and down; {summary['expert_weights']:,} weights"
    )
    for kind, block in summary["blocks"].items():
        console.print(
            f"  {kind}: {block['rows']} x {block['cols']} "
            f"(padded {block['padded_rows']} x {block['padded_cols']}), "
            f"a plane is {_size(block['plane_bytes'])}"
        )
    console.print(_levels(summary))
    console.print(
        f"on disk: {files['count']} files, {_size(files['bytes'])}; experts at all levels "
        f"{_size(files['expert_bytes'])}, everything else {_size(files['plain_bytes'])}"
    )
    _show_calibration(calibration, summary["experts"], console)
    checks = summary["checks"]
    console.print(f"checks: structure {checks['structure']}, checksums {checks['checksums']}")


def _levels(summary: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(title="all routed experts at uniform bits", title_justify="left")
    for name in ("bits", "planes", "tables", "total", "tables %", "bits per weight"):
        table.add_column(name, justify="right")
    for level in summary["levels"]:
        table.add_row(
            str(level["bits"]),
            _size(level["plane_bytes"]),
            _size(level["table_bytes"]),
            _size(level["bytes"]),
            f"{100 * level['table_bytes'] / level['bytes']:.1f}",
            f"{level['bits_per_weight']:.3f}",
        )
    return table


def _show_calibration(calibration: dict[str, Any], experts: int, console: Console) -> None:
    console.print(
        f"calibration: {calibration['text']}, {calibration['sequences']} sequences of "
        f"{calibration['sequence_length']} tokens, {calibration['routed_tokens']:,} routed"
    )
    measured = [name for name in ("sensitivity", "residual") if calibration[name]]
    console.print(f"  measured beside the error: {', '.join(measured) or 'nothing'}")
    least = min(calibration["layers"], key=lambda layer: layer["seen"])
    unseen = calibration["unseen_experts"]
    total = experts * len(calibration["layers"])
    if not unseen:
        console.print(f"  coverage: all {total} experts were routed to")
        return
    shown = ", ".join(f"{layer}/{expert}" for layer, expert in unseen[:8])
    more = f" and {len(unseen) - 8} more" if len(unseen) > 8 else ""
    console.print(
        f"  [yellow]coverage: {total - len(unseen)} of {total} experts; never routed to "
        f"(layer/expert): {shown}{more}; least covered is layer {least['layer']} with "
        f"{least['seen']} of {experts}[/yellow]"
    )


def _size(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
