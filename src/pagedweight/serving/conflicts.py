"""Flags of vLLM that do not go together here, and why: refused before anything starts."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pagedweight.errors import UserError
from pagedweight.serving.options import ServeOptions

_OURS = "--memory sets it"
NEVER = {
    "--scheduler-cls": _OURS,
    "--worker-cls": _OURS,
    "--kv-cache-memory-bytes": _OURS,
    "--num-gpu-blocks-override": _OURS,
    "--enable-sleep-mode": "it releases the memory that the pool counts on",
    "--enable-eplb": "it moves experts between ranks",
    "--kv-transfer-config": "connectors register KV memory, which here comes and goes",
    "--expert-placement-strategy": "experts are expected in vLLM's usual order",
}
"""Whatever their value."""
ABOVE_ONE = {
    ("--data-parallel-size", "-dp"): "each engine would plan for memory that the others plan for",
}
"""Refused when larger than 1."""
_ALSO = "; it works without --memory, at fixed bits (--bits, --plan)"
_STATIC = ("--expert-placement-strategy", "--data-parallel-size")


def refuse_with_memory(arguments: Sequence[str]) -> None:
    """UserError naming every flag among vLLM's `arguments` that --memory does not go with."""
    faults = [
        f"{flag} ({why}{_ALSO if flag in _STATIC else ''})"
        for flag, why in NEVER.items()
        if has(arguments, flag)
    ]
    for flags, why in ABOVE_ONE.items():
        if number(arguments, *flags) > 1:
            faults.append(f"{flags[0]} ({why}{_ALSO if flags[0] in _STATIC else ''})")
    if faults:
        raise UserError(f"--memory does not go with {'; nor with '.join(faults)}")
    if value(arguments, "--distributed-executor-backend") == "ray" and _first_ray_executor():
        raise UserError(
            "--memory does not go with vLLM's first Ray executor (VLLM_USE_RAY_V2_EXECUTOR_BACKEND="
            "0), which calls the model past the worker: leave that variable out"
        )


def refuse_with_holdings(options: ServeOptions, stages: int) -> None:
    """UserError for what needs ranks that hold all rows, where experts or layers are dealt out."""
    given = [f"--{name}" for name in ("trace", "replay") if getattr(options, name) is not None]
    if given:
        raise UserError(
            f"{', '.join(given)}: not with --enable-expert-parallel or --pipeline-parallel-size, "
            "where ranks hold different rows; give --memory alone"
        )
    if options.gpu_memory is not None and stages > 1:
        raise UserError(
            "--gpu-memory does not go with --pipeline-parallel-size: what each stage holds beside "
            "experts and KV is not counted; give --memory"
        )


def _first_ray_executor() -> bool:
    return os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1") == "0"


def refuse_on_cpu(arguments: Sequence[str]) -> None:
    """UserError for what vLLM 0.32's CPU worker starts and then dies of at the first request."""
    if number(arguments, "--pipeline-parallel-size", "-pp") > 1 and has(
        arguments, "--enforce-eager"
    ):
        raise UserError(
            "--enforce-eager does not go with --pipeline-parallel-size on the CPU: vLLM makes the "
            "buffers between stages while it compiles; leave --enforce-eager out"
        )


def has(arguments: Sequence[str], flag: str) -> bool:
    """Whether a flag is among `arguments`; vLLM takes underscores for dashes in its name."""
    return any(_name(argument) == flag for argument in arguments)


def number(arguments: Sequence[str], *flags: str) -> int:
    """The number given for one of `flags`, 1 when there is none; UserError when it is no number."""
    given = value(arguments, *flags)
    try:
        return 1 if given is None else int(given)
    except ValueError as error:
        raise UserError(f"{flags[0]}: {given!r} is not a number") from error


def value(arguments: Sequence[str], *flags: str) -> str | None:
    """What was given for the first of `arguments` that is one of `flags`; None without any."""
    for index, argument in enumerate(arguments):
        if _name(argument) in flags:
            _, given, text = argument.partition("=")
            return text if given else next(iter(arguments[index + 1 : index + 2]), "")
    return None


def _name(argument: str) -> str:
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name
