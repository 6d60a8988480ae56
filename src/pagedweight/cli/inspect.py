"""`pagedweight inspect`: what a checkpoint holds and whether it is whole, or what one will take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedweight.cli.sizes import size

if TYPE_CHECKING:
    from rich.console import Console

    from pagedweight.checkpoint.reader import Checkpoint

_FORECAST = "Before there is a checkpoint"


def command(
    path: Annotated[
        Path | None, typer.Argument(metavar="OUT", help="A quantized checkpoint's folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare its checksum.")
    ] = False,
    policy: Annotated[
        Path | None, typer.Option(help="A policy file instead of a checkpoint.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A config.json instead of a checkpoint: what will it take?",
            rich_help_panel=_FORECAST,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Device memory for everything, for example 24GiB.", rich_help_panel=_FORECAST
        ),
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option(
            help="Of the budget, what neither weights nor KV get (default: 8%).",
            rich_help_panel=_FORECAST,
        ),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(help="Bits of every linear block.", rich_help_panel=_FORECAST),
    ] = None,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Choose bits for the budget.", rich_help_panel=_FORECAST),
    ] = False,
) -> None:
    """Show what a checkpoint holds and whether it is whole; what a model will take; or a policy."""
    from rich.console import Console

    from pagedweight.checkpoint.reader import Checkpoint
    from pagedweight.checkpoint.summary import summarize
    from pagedweight.errors import UserError

    if policy is not None:
        others = (path, config, budget, reserve, bits)
        if any(value is not None for value in others) or verify or plan:
            raise UserError("--policy shows a policy file alone: leave out OUT and all but --json")
        from pagedweight.cli.inspect_policy import show_policy

        return show_policy(policy, as_json)
    if config is not None:
        if path is not None or verify:
            raise UserError("--config does not go with OUT and --verify: nothing is there yet")
        return _forecast(config, budget, reserve, bits, plan, as_json)
    if path is None:
        raise UserError("nothing to inspect: give OUT, --config with a config.json, or --policy")
    if plan or (budget, reserve, bits) != (None,) * 3:
        raise UserError(
            "--budget, --reserve, --bits and --plan go with --config; the config.json of OUT does"
        )
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


def _forecast(
    config: Path,
    budget: str | None,
    reserve: str | None,
    bits: int | None,
    plan: bool,
    as_json: bool,
) -> None:
    from rich.console import Console

    from pagedweight.cli.inspect_config import forecast_report, show_forecast

    report = forecast_report(config, budget, reserve, bits, plan)
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        show_forecast(report, Console(highlight=False))


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
        f"from {summary['source'].get('name')} ({size(summary['source'].get('bytes', 0))})"
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
            f"a plane is {size(block['plane_bytes'])}"
        )
    console.print(_levels(summary))
    console.print(
        f"on disk: {files['count']} files, {size(files['bytes'])}; experts at all levels "
        f"{size(files['expert_bytes'])}, everything else {size(files['plain_bytes'])}"
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
            size(level["plane_bytes"]),
            size(level["table_bytes"]),
            size(level["bytes"]),
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
