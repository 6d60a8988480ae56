"""Flags of vLLM that do not go together here, and why: refused before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

from pagedweight.errors import UserError

_OURS = "--memory sets it"
NEVER = {
    "--scheduler-cls": _OURS,
    "--worker-cls": _OURS,
    "--kv-cache-memory-bytes": _OURS,
    "--num-gpu-blocks-override": _OURS,
    "--enable-sleep-mode": "it releases the memory that the pool counts on",
    "--enable-eplb": "it moves experts between ranks",
    "--kv-transfer-config": "connectors register KV memory, which here comes and goes",
    "--enable-expert-parallel": (
        "each rank would hold other experts and give back other pages, and a plan has one target "
        "for all ranks"
    ),
}
"""Whatever their value."""
ABOVE_ONE = {
    ("--pipeline-parallel-size", "-pp"): (
        "each rank would hold other layers and give back other pages, and a plan has one target "
        "for all ranks"
    ),
    ("--data-parallel-size", "-dp"): "each engine would plan for memory that the others plan for",
}
"""Refused when larger than 1."""
_ALSO = "; it works without --memory, at fixed bits (--bits, --plan)"
_STATIC = ("--enable-expert-parallel", "--pipeline-parallel-size", "--data-parallel-size")


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
    for index, argument in enumerate(arguments):
        if _name(argument) not in flags:
            continue
        _, given, value = argument.partition("=")
        value = value if given else next(iter(arguments[index + 1 : index + 2]), "")
        try:
            return int(value)
        except ValueError as error:
            raise UserError(f"{argument}: {value!r} is not a number") from error
    return 1


def _name(argument: str) -> str:
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name
