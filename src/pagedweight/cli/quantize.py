"""`pagedweight quantize`: a Hugging Face MoE checkpoint to bit-planes, a layer at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedweight.cli.progress import staged_progress
from pagedweight.errors import UserError, listing

if TYPE_CHECKING:
    from rich.console import Console

    from pagedweight.checkpoint.source import SourceCheckpoint
    from pagedweight.quantize.pipeline import QuantizeOptions, QuantizeResult


class CodesName(StrEnum):
    """Values of --codes."""

    kmeans = "kmeans"
    compensated = "compensated"


STAGES = {
    "check": "checking values",
    "copy": "copying other tensors",
    "layers": "quantizing linear blocks",
}


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of the source.")],
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="Folder to write; new or empty.")
    ],
    bits: Annotated[
        str, typer.Option(help="Levels to store, the first being the seed: 2-6, 3-5, 4.")
    ] = "2-6",
    calibration: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:FIRST-LAST]",
            help='Text, or JSON lines with "text"; a range picks documents, counted from 0. '
            "Without it every input column counts the same.",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 16,
    sequence_length: Annotated[int, typer.Option(help="Tokens in each of them.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Picks the sequences out of the text.")] = 0,
    table_dtype: Annotated[
        str | None,
        typer.Option(help="float16 or bfloat16; by default the source's, else bfloat16."),
    ] = None,
    codes: Annotated[
        CodesName | None,
        typer.Option(
            help="compensated: fitted to how a block's inputs go together (docs/codes.md); kmeans: "
            "to the size of each input alone, sooner done. By default compensated with a "
            "calibration, else kmeans.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the bytes of every file and write nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an unfinished OUT, same options.")
    ] = False,
) -> None:
    """Quantize the routed experts of MODEL to nested bit-planes in OUT."""
    from rich.console import Console

    from pagedweight.calibrate.stream import context_length
    from pagedweight.calibrate.text import CalibrationChoice, load_tokens
    from pagedweight.checkpoint.layout import check_dtype, check_levels, predicted_bytes
    from pagedweight.checkpoint.source import SourceCheckpoint
    from pagedweight.quantize.pipeline import QuantizeOptions

    levels = check_levels(parse_bits(bits))
    if table_dtype:
        check_dtype(table_dtype)
    source = SourceCheckpoint.open(model)
    console = Console(highlight=False, soft_wrap=True)
    tokens = None
    if calibration:
        choice = CalibrationChoice(calibration, sequences, sequence_length, seed)
        tokens = load_tokens(choice, model, context_length(source))
    options = QuantizeOptions(
        levels, table_dtype, tokens, device, resume, codes.value if codes else None
    )
    if dry_run:
        console.print(f"codes: {'compensated' if options.compensated else 'kmeans'}")
        _show_sizes(source, predicted_bytes(source, levels, table_dtype), console)
        return
    _show_result(source, out, options, _run(source, out, options), console)


def parse_bits(text: str) -> tuple[int, ...]:
    """ "2-6" or "4" or "2,3,4" to levels; raises UserError when it is none of these."""
    if match := re.fullmatch(r"(\d)-(\d)", text.strip()):
        return tuple(range(int(match[1]), int(match[2]) + 1))
    if re.fullmatch(r"\d(,\d)*", text.strip()):
        return tuple(int(part) for part in text.strip().split(","))
    raise UserError(f"--bits {text!r} is not a range of levels; for example 2-6")


def _run(source: SourceCheckpoint, out: Path, options: QuantizeOptions) -> QuantizeResult:
    """Quantize under a progress bar; plain lines when stderr is not a terminal."""
    from pagedweight.quantize.pipeline import quantize_checkpoint

    with staged_progress(STAGES) as report:
        return quantize_checkpoint(source, out, options, report)


def _show_sizes(source: SourceCheckpoint, sizes: Mapping[str, int], console: Console) -> None:
    from rich.table import Table

    table = Table("file", box=None)
    table.add_column("bytes", justify="right")
    for name, size in sizes.items():
        table.add_row(name, f"{size:,}")
    console.print(table)
    experts = sum(size for name, size in sizes.items() if name.startswith("experts/layer-"))
    total = sum(sizes.values())
    console.print(
        f"total {total:,} bytes: experts at all levels {experts:,}, everything else "
        f"{total - experts:,}; the source's tensors are {source.total_bytes:,}"
    )
    console.print("nothing was written (--dry-run)")


def _show_result(
    source: SourceCheckpoint,
    out: Path,
    options: QuantizeOptions,
    result: QuantizeResult,
    console: Console,
) -> None:
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    shape, layers = source.shape, len(result.moe_layers)
    console.print(
        f"{out}: {2 * layers * shape.experts:,} linear blocks at {options.bits[0]} to "
        f"{options.bits[-1]} bits, {total:,} bytes (the source's tensors: {source.total_bytes:,})"
    )
    summed = result.error.sum(axis=(0, 1, 2), dtype=float)
    console.print(
        "weighted squared error: "
        + ", ".join(f"{b} bits {e:.4g}" for b, e in zip(options.bits, summed, strict=True))
    )
    if result.plain_kept is not None:
        console.print(
            f"codes: compensated in {int((result.plain_kept == 0).sum()):,} linear blocks, plain "
            f"k-means kept in {int(result.plain_kept.sum()):,} that they did not serve better"
        )
    console.print(_coverage(options, result, layers * shape.experts))


def _coverage(options: QuantizeOptions, result: QuantizeResult, experts: int) -> str:
    """What calibration saw, in a sentence or two."""
    if options.calibration is None:
        return "no calibration: every input column counted the same (--calibration FILE weighs it)"
    counts: Any = options.calibration.tokens.shape
    share = result.tokens / result.tokens.sum(axis=1, keepdims=True)
    said = f"calibrated on {counts[0]} sequences of {counts[1]} tokens; "
    if not result.unseen:
        return said + f"all {experts} experts were routed to, the idlest by {share.min():.3%}"
    seen = share[share > 0].min()
    return said + (
        f"{len(result.unseen)} of {experts} experts never routed to, 0% of their layer's tokens, "
        f"so their columns count the same (layer/expert): "
        f"{listing(f'{layer}/{expert}' for layer, expert in result.unseen)}; "
        f"the idlest other expert was routed to by {seen:.3%}"
    )
