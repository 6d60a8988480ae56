"""`pagedweight eval`: token perplexity and KL to the unquantized model, or tasks with answers."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


_TASKS = "Tasks (lm-eval, vLLM engine)"
_POLICIES = "Policies at equal bytes (reference engine)"


class EngineName(StrEnum):
    """Values of --engine."""

    reference = "reference"
    vllm = "vllm"


class DeviceName(StrEnum):
    """Values of --device."""

    cpu = "cpu"
    cuda = "cuda"


class LoadName(StrEnum):
    """Values of --load."""

    requests = "requests"
    constant = "constant"


def command(
    path: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A quantized checkpoint, or an unquantized one."),
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text file, or JSON lines with a 'text'; FILE:0-499 picks documents. For policies "
            "several, each FILE or NAME=FILE."
        ),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="Bits of every linear block (default: the highest stored).")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|POLICY:BUDGET",
            help="Plan file with the bits of each linear block, or a baseline, as for serve.",
        ),
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
    seed: Annotated[int, typer.Option(min=0, help="Of the drawing and of the intervals.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16 (default: float32; vLLM: the model's)."),
    ] = None,
    device: Annotated[DeviceName, typer.Option(help="Where the reference runs.")] = DeviceName.cpu,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    tasks: Annotated[
        str | None,
        typer.Option(help="Tasks to run instead, separated by commas.", rich_help_panel=_TASKS),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' data.", rich_help_panel=_TASKS)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Items of each task (default: all).", rich_help_panel=_TASKS)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Serve the tasks elastically in this memory, as serve does.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    policy_file: Annotated[
        Path | None,
        typer.Option(help="Policy file for --memory and for paged (default: the defaults)."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="uniform, random, static, dynamic-layer, paged, oracle; several with commas.",
            rich_help_panel=_POLICIES,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the routed experts: 28.5MB, or 3b for those of uniform 3 bits; several "
            "with commas.",
            rich_help_panel=_POLICIES,
        ),
    ] = None,
    frontier: Annotated[
        bool,
        typer.Option("--frontier", help="All policies, 2.5 to 5 bits.", rich_help_panel=_POLICIES),
    ] = False,
    ablation: Annotated[
        bool,
        typer.Option(
            "--ablation", help="paged without each of its parts.", rich_help_panel=_POLICIES
        ),
    ] = False,
    load: Annotated[
        LoadName,
        typer.Option(
            help="KV that paged is under: comes and goes with each window, or always the same.",
            rich_help_panel=_POLICIES,
        ),
    ] = LoadName.requests,
    replan_tokens: Annotated[
        int | None,
        typer.Option(
            help="Plan again after so many tokens of a window (default: once a window).",
            rich_help_panel=_POLICIES,
        ),
    ] = None,
    pressure: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --budget, a run of serve --timeline: paged gets what its weights "
            "had, window by window; the others what they had at the worst.",
            rich_help_panel=_POLICIES,
        ),
    ] = None,
    seats: Annotated[
        int, typer.Option(help="Policies that run side by side.", rich_help_panel=_POLICIES)
    ] = 8,
    oracle_windows: Annotated[
        int,
        typer.Option(
            help="Windows of a text that its oracle is made from.", rich_help_panel=_POLICIES
        ),
    ] = 16,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write JSON there.", rich_help_panel=_POLICIES),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw the frontier or ablation there.", rich_help_panel=_POLICIES),
    ] = None,
    per_window: Annotated[
        Path | None,
        typer.Option(help="Write every window's numbers there (npz).", rich_help_panel=_POLICIES),
    ] = None,
) -> None:
    """Measure perplexity on a text and, with --model, KL to the unquantized model; or run tasks;
    or compare policies at equal bytes."""
    from rich.console import Console
    from rich.progress import Progress

    from pagedweight.cli.eval_study import Asked, run_study, study_options
    from pagedweight.errors import UserError
    from pagedweight.eval.evaluate import EvalOptions, evaluate
    from pagedweight.eval.windows import WindowChoice, named_choices

    if tasks is not None:
        if text or model is not None or policy is not None or frontier or ablation:
            raise UserError(
                "--tasks does not go with --text, --model, --policy, --frontier and --ablation: "
                "run eval for each"
            )
        if (budget, replan_tokens, pressure, output, picture, per_window) != (None,) * 6:
            raise UserError(
                "--budget, --replan-tokens, --pressure, --output, --picture and --per-window do "
                "not go with --tasks; --json prints the report"
            )
        served = (bits, plan, memory, policy_file)
        return _run_tasks(path, tasks, data_dir, limit, served, dtype, seed, as_json)
    if (data_dir, limit, memory) != (None,) * 3:
        raise UserError("--data-dir, --limit and --memory go with --tasks")
    if not text:
        raise UserError("nothing to measure: give --text FILE, or --tasks with --data-dir")
    if policy is not None or frontier or ablation:
        asked = Asked(policy, budget, frontier, ablation, output, picture, per_window, pressure)
        under = (policy_file, load.value, replan_tokens, pressure, dtype, device.value, seats)
        texts = named_choices(text, window, windows, seed)
        _refuse_static(bits, plan, engine)
        return run_study(
            study_options(path, model, texts, under, seed, oracle_windows), asked, as_json
        )
    stray = (policy_file, budget, replan_tokens, pressure, output, picture, per_window)
    under = load is not LoadName.requests or (seats, oracle_windows) != (8, 16)
    if under or any(value is not None for value in stray):
        raise UserError(
            "--policy-file, --budget, --load, --replan-tokens, --pressure, --seats, "
            "--oracle-windows, --output, --picture and --per-window go with --policy, "
            "--frontier or --ablation"
        )
    if len(text) > 1:
        raise UserError(f"{len(text)} texts: several go with --policy, --frontier or --ablation")
    choice = WindowChoice(text[0], window, windows, seed)
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


def _refuse_static(bits: int | None, plan: str | None, engine: EngineName) -> None:
    from pagedweight.errors import UserError

    if bits is not None or plan is not None or engine is EngineName.vllm:
        raise UserError(
            "policies choose the bits, in the reference engine: --bits, --plan and --engine vllm "
            "do not go with them"
        )


def _run_tasks(
    path: Path,
    tasks: str,
    data_dir: Path | None,
    limit: int | None,
    served: tuple[int | None, str | None, str | None, Path | None],
    dtype: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """`served`: bits, plan, memory, policy file."""
    from rich.console import Console

    from pagedweight.errors import UserError
    from pagedweight.eval.tasks.harness import TaskOptions, run_tasks
    from pagedweight.eval.tasks.table import show_tasks
    from pagedweight.serving.options import ServeOptions, parse_bytes
    from pagedweight.serving.plans import plan_argument

    if data_dir is None:
        raise UserError("--tasks needs --data-dir, the folder with the tasks' data")
    bits, plan, memory, policy = served
    if policy is not None and memory is None:
        raise UserError("--policy-file only means something together with --memory or --policy")
    serve = ServeOptions(
        bits=bits,
        plan=plan_argument(plan),
        memory=None if memory is None else parse_bytes(memory),
        policy=str(policy.resolve()) if policy else None,
    )
    names = tuple(filter(None, (name.strip() for name in tasks.split(","))))
    report = run_tasks(TaskOptions(path, names, data_dir, limit, serve, dtype, seed))
    if as_json:
        print(json.dumps(report))
    else:
        show_tasks(report, Console(highlight=False))


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
