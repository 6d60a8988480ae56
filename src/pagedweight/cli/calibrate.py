"""`pagedweight calibrate`: sensitivities, residual heads and a policy for a finished checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedweight.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from pagedweight.calibrate.measurements import Measurements
    from pagedweight.calibrate.pipeline import Calibrated
    from pagedweight.calibrate.search.run import SearchResult
    from pagedweight.checkpoint.reader import Checkpoint

STAGES = {
    "forward": "forward, layer by layer",
    "head": "loss and its gradient",
    "backward": "backward, layer by layer",
}
_SEARCH = "Policy search"


def command(
    path: Annotated[Path, typer.Argument(metavar="OUT", help="A quantized checkpoint's folder.")],
    model: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="Folder of its source; for a search alone, nothing."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:FIRST-LAST]",
            help='Text, or JSON lines with "text"; a range picks documents, counted from 0.',
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Calibration sequences.")] = 16,
    sequence_length: Annotated[int, typer.Option(help="Tokens in each of them.")] = 2048,
    seed: Annotated[
        int, typer.Option(min=0, help="Picks the sequences, draws labels, splits the search.")
    ] = 0,
    sensitivity: Annotated[
        str, typer.Option(help="per-token, or factored: cheaper, and less exact.")
    ] = "per-token",
    labels: Annotated[
        str,
        typer.Option(
            help="Tokens whose probability the gradients are of: drawn from the model (model), or "
            "the next ones of the text (text)."
        ),
    ] = "model",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    report: Annotated[
        Path | None, typer.Option(help="Write what was measured into this JSON file.")
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Search a policy and write it to --policy-out, or OUT/policy.json.",
            rich_help_panel=_SEARCH,
        ),
    ] = False,
    policy_out: Annotated[
        Path | None,
        typer.Option(help="Policy file to write; implies --search.", rich_help_panel=_SEARCH),
    ] = None,
    measurements: Annotated[
        Path | None,
        typer.Option(
            help="With --data, keep what the search needs in this file. Without, read it from "
            "there: OUT stays as it is and only the search runs.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
) -> None:
    """Measure what every linear block of OUT loses at every level; codes are not touched."""
    from rich.console import Console

    from pagedweight.calibrate.head import LABELS
    from pagedweight.calibrate.measurements import Measurements
    from pagedweight.calibrate.search.folds import Split
    from pagedweight.calibrate.sensitivity import METHODS
    from pagedweight.checkpoint.reader import Checkpoint
    from pagedweight.checkpoint.recalibrate import settle
    from pagedweight.checkpoint.result_file import check_target

    _one_of("--sensitivity", sensitivity, METHODS)
    _one_of("--labels", labels, LABELS)
    _one_of("--device", device, ("cpu", "cuda"))
    wanted = policy_out or (path / "policy.json" if search else None)
    settle(path)
    checkpoint = Checkpoint.open(path)
    for target in (report, wanted, measurements if data is not None else None):
        if target is not None:
            check_target(target)
    if wanted is not None and data is not None:
        Split.of(sequences, seed)  # refuses too few before they are measured
    console = Console(highlight=False, soft_wrap=True)
    content: dict[str, Any] = {}
    if data is not None:
        if model is None:
            raise UserError(f"--data needs the model that {path} was quantized from: give MODEL")
        from pagedweight.calibrate.measure import MeasureOptions
        from pagedweight.calibrate.text import CalibrationChoice

        how = MeasureOptions(sensitivity, labels, seed, device)  # type: ignore[arg-type]
        choice = CalibrationChoice(data, sequences, sequence_length, seed)
        found, content = _measure(checkpoint, model, choice, how, console)
        if measurements:
            found.save(measurements)
    else:
        if measurements is None or wanted is None:
            raise UserError(
                "calibration needs a text: --data FILE; only a policy search can do without, on "
                "what an earlier run kept: --search --measurements FILE"
            )
        blocks = (len(checkpoint.moe_layers), checkpoint.shape.experts, 2)
        found = Measurements.load(measurements, blocks, len(checkpoint.bits))
    if wanted:
        content["search"] = _search(checkpoint, found, seed, wanted, console)
    if report:
        _write_json(report, content)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{option} {value} is not one of {', '.join(allowed)}")


def _measure(
    checkpoint: Checkpoint, model: Path, choice: Any, how: Any, console: Console
) -> tuple[Measurements, dict[str, Any]]:
    """Calibrate under a progress bar; what the search needs, and the report."""
    from pagedweight.calibrate.pipeline import calibrate_checkpoint
    from pagedweight.calibrate.stream import context_length
    from pagedweight.calibrate.text import load_tokens
    from pagedweight.checkpoint.source import SourceCheckpoint
    from pagedweight.cli.progress import staged_progress

    source = SourceCheckpoint.open(model)
    text = load_tokens(choice, model, context_length(source))
    with staged_progress(STAGES) as tell:
        result = calibrate_checkpoint(checkpoint, source, text, how, tell)
    content = _content(checkpoint, result)
    _show(content, console)
    return result.measured.measurements, content


def _content(checkpoint: Checkpoint, result: Calibrated) -> dict[str, Any]:
    """The report, ready for JSON."""
    from pagedweight.bench.record import machine
    from pagedweight.calibrate.pipeline import coverage
    from pagedweight.core.geometry import KINDS

    arrays, heads = result.measured.arrays, result.heads
    predicted = arrays["sensitivity"].sum((0, 1, 2), dtype=float)
    tokens = float(result.measured.measurements.length.sum())
    return {
        "checkpoint": checkpoint.path.name,
        **result.metadata,
        "machine": machine(),
        "seconds": {stage: round(value, 2) for stage, value in result.seconds.items()},
        "cpu_seconds": round(result.cpu_seconds, 2),
        "peak_bytes": result.peak_bytes,
        "perplexity": result.measured.perplexity,
        "coverage": coverage(arrays["tokens"], checkpoint.moe_layers),
        "levels": [
            {"bits": bits, "predicted_kl": float(total / (2 * tokens))}
            for bits, total in zip(checkpoint.bits, predicted, strict=True)
        ],
        "residual": [
            {
                "kind": kind,
                "from_bits": checkpoint.bits[step + 1],
                "to_bits": checkpoint.bits[step],
                "held_out_r2": float(heads.r2[at, step]),
                "target_spread": float(heads.spread[at, step]),
                "weight": heads.heads.weight[at, step].tolist(),
                "bias": float(heads.heads.bias[at, step]),
                "clip": heads.heads.clip[at, step].tolist(),
            }
            for at, kind in enumerate(KINDS)
            for step in range(len(checkpoint.bits) - 1)
        ],
    }


def _show(content: dict[str, Any], console: Console) -> None:
    cover, seconds = content["coverage"], content["seconds"]
    console.print(
        f"{content['checkpoint']}: calibrated on {content['sequences']} sequences of "
        f"{content['sequence_length']} tokens in {sum(seconds.values()):.0f} s, perplexity of the "
        f"source {content['perplexity']:.2f}"
    )
    unseen = cover["unseen"]
    said = f"{cover['seen']} of {cover['experts']} experts were routed to"
    if unseen:
        names = ", ".join(f"{layer}/{expert}" for layer, expert in unseen[:8])
        more = f" and {len(unseen) - 8} more" if len(unseen) > 8 else ""
        said += (
            f"; never (layer/expert): {names}{more}: each counts as sensitive as the least of its "
            f"layer's others"
        )
    else:
        said += f", the idlest with {cover['fewest_tokens']} tokens"
    console.print(said)
    console.print(
        "predicted KL at uniform bits: "
        + ", ".join(f"{row['bits']} {row['predicted_kl']:.4f}" for row in content["levels"])
    )
    if content["residual"]:
        console.print(
            "residual heads, held-out R^2: "
            + ", ".join(
                f"{row['kind']} {row['from_bits']}->{row['to_bits']} {row['held_out_r2']:.2f}"
                for row in content["residual"]
            )
        )


def _search(
    checkpoint: Checkpoint, found: Measurements, seed: int, out: Path, console: Console
) -> dict[str, Any]:
    """Search, write the policy, say what came out."""
    import time
    from dataclasses import asdict

    from pagedweight.calibrate.search.run import search_policy
    from pagedweight.cli.progress import staged_progress
    from pagedweight.core.policy import Policy
    from pagedweight.core.policy_file import save_policy
    from pagedweight.core.size_table import SizeTable

    sizes, start = SizeTable.of(checkpoint.shape, checkpoint.bits), time.perf_counter()
    with staged_progress({"search": "searching a policy"}) as tell:
        result = search_policy(
            found, checkpoint.bits, sizes, Policy(), seed, lambda done: tell("search", done, 0)
        )
    try:
        save_policy(result.policy, out)
    except OSError as error:
        raise UserError(f"cannot write policy {out}: {error}") from None
    _show_search(result, out, console)
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "knobs": asdict(result.knobs),
        "check": result.check,
        "trials": result.trials,
        "tried": result.tried,
    }


def _show_search(result: SearchResult, out: Path, console: Console) -> None:
    from dataclasses import asdict

    from rich.table import Table

    console.print(
        f"{out}: best of {len(result.tried)} policies: "
        + ", ".join(f"{name} {value}" for name, value in asdict(result.knobs).items())
    )
    budgets = sorted({row["budget_bits"] for row in result.check})
    table = Table(
        "held-out text", "policy", *(f"{bits:g} bits" for bits in budgets),
        title="measured damage over the static plan's, by budget", title_justify="left", box=None,
    )  # fmt: skip
    for trial, name in dict.fromkeys((row["trial"], row["policy"]) for row in result.check):
        values = [
            f"{row['damage_over_static']:.3f}"
            for row in result.check
            if (row["trial"], row["policy"]) == (trial, name)
        ]
        table.add_row(trial, name, *values)
    console.print(table)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    import json

    from pagedweight.checkpoint.result_file import write_result

    write_result(path, (json.dumps(content, indent=1) + "\n").encode())
