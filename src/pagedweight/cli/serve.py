"""`pagedweight serve`: vLLM's OpenAI server on a quantized checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"context_settings": {"allow_extra_args": True, "ignore_unknown_options": False}}


def command(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="OUT", help="A quantized checkpoint's folder.")],
    bits: Annotated[
        int | None, typer.Option(help="Bits of every linear block (default: the highest stored).")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Plan file with the bits of each linear block.")
    ] = None,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print the vLLM command instead of running it.")
    ] = False,
) -> None:
    """Start vLLM's OpenAI server. Flags after `--` go to `vllm serve` as they are."""
    import os
    import shlex

    from pagedweight.serving.launch import vllm_command
    from pagedweight.serving.options import ServeOptions

    options = ServeOptions(bits=bits, plan=str(plan.resolve()) if plan else None)
    argv = vllm_command(path, options, context.args)
    if print_command:
        print(shlex.join(argv))
        return
    os.execv(argv[0], argv)
