"""`pagedweight serve`: vLLM's OpenAI server on a quantized checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": False}}
_ELASTIC = "Elastic precision"


def command(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="OUT", help="A quantized checkpoint's folder.")],
    bits: Annotated[
        int | None, typer.Option(help="Bits of every linear block (default: the highest stored).")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|POLICY:BUDGET",
            help="Plan file with the bits of each linear block, or a baseline within a budget of "
            "routed experts' bytes: uniform:3b, random:2.5b:SEED, static:28.5MB, dynamic-layer:3b "
            "(docs/evaluation.md).",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for routed experts and KV cache together, for example 24GiB. Precision "
            "gives way to KV and returns; with --bits or --plan it stays as it is.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="All memory of each rank's GPU, for example 24GiB, or auto for vLLM's own "
            "--gpu-memory-utilization; --memory follows from it.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    gpu_reserve: Annotated[
        str | None,
        typer.Option(
            help="Of --gpu-memory, for activations, graphs and the driver (default: 8%).",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Policy file.", rich_help_panel=_ELASTIC)
    ] = None,
    freeze: Annotated[
        bool,
        typer.Option(
            "--freeze", help="Keep the bits of the start (repeatable).", rich_help_panel=_ELASTIC
        ),
    ] = False,
    prefix_policy: Annotated[
        str,
        typer.Option(
            help="keep or reset cached prefixes whose KV was computed at other bits.",
            rich_help_panel=_ELASTIC,
        ),
    ] = "keep",
    page_bytes: Annotated[
        int | None, typer.Option(help="Bytes of a memory page.", rich_help_panel=_ELASTIC)
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Most pinned host memory that a GPU rank may take (default: what there is).",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    pageable: Annotated[
        bool,
        typer.Option(
            "--pageable",
            help="Restore precision from the checkpoint's files instead of pinned memory.",
            rich_help_panel=_ELASTIC,
        ),
    ] = False,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Record what happens over time in this file, for top and plot.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Record observations, plans and bits into this folder.", rich_help_panel=_ELASTIC
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Follow the bits.jsonl of a --trace folder instead of planning.",
            rich_help_panel=_ELASTIC,
        ),
    ] = None,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print the vLLM command instead of running it.")
    ] = False,
) -> None:
    """Start vLLM's OpenAI server. Flags after `--` go to `vllm serve` as they are."""
    import os
    import shlex

    from pagedweight.serving.elastic.metrics import share_metrics
    from pagedweight.serving.launch import vllm_command
    from pagedweight.serving.options import ServeOptions
    from pagedweight.serving.plans import plan_argument

    options = ServeOptions(
        bits=bits,
        plan=plan_argument(plan),
        memory=_size(memory),
        gpu_memory=_size(gpu_memory, auto=0),
        gpu_reserve=_size(gpu_reserve),
        page_bytes=page_bytes,
        host_memory=_size(host_memory),
        pageable=pageable,
        policy=_absolute(policy),
        freeze=freeze,
        prefix_policy=prefix_policy,
        timeline=_absolute(timeline),
        trace=_absolute(trace),
        replay=_absolute(replay),
    )
    argv = vllm_command(path, options, context.args)
    if print_command:
        print(shlex.join(argv))
        return
    environment = share_metrics(os.environ) if options.budgeted else dict(os.environ)
    os.execve(argv[0], argv, environment)


def _size(text: str | None, auto: int | None = None) -> int | None:
    """Bytes of a flag; None when it was not given, `auto` for the word."""
    from pagedweight.errors import UserError
    from pagedweight.serving.options import parse_bytes

    if text is None:
        return None
    if text == "auto" and auto is not None:
        return auto
    found = parse_bytes(text)
    if found == 0 and auto == 0:
        raise UserError("--gpu-memory 0: give the GPU's memory, for example 24GiB, or auto")
    return found


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())
