"""`pagedweight plan`: a baseline's bits within a budget, as a plan file for serve and eval."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class PolicyName(StrEnum):
    """Values of --policy: those that keep their bits."""

    uniform = "uniform"
    random = "random"
    static = "static"


def command(
    path: Annotated[Path, typer.Argument(metavar="OUT", help="A quantized checkpoint's folder.")],
    budget: Annotated[
        str,
        typer.Option(help="Bytes of the routed experts: 28.5MB, or 3b for uniform 3 bits' bytes."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The plan file to write.")],
    policy: Annotated[
        PolicyName,
        typer.Option(help="static: by sensitivity; uniform: one level; random: drawn blocks."),
    ] = PolicyName.static,
    policy_file: Annotated[
        Path | None, typer.Option(help="Policy file, for the floors of static.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the blocks that are drawn.")] = 0,
) -> None:
    """Write the bits of a baseline within a budget, for `serve --plan` and `eval --plan`."""
    from rich.console import Console

    from pagedweight.checkpoint.plan import save_plan
    from pagedweight.checkpoint.reader import Checkpoint
    from pagedweight.checkpoint.result_file import check_target
    from pagedweight.core.planner import PlanContext
    from pagedweight.core.policies import make_policy
    from pagedweight.core.policy import Policy
    from pagedweight.core.policy_file import load_policy
    from pagedweight.core.size_table import BlockIndex, SizeTable
    from pagedweight.serving.expert_budget import parse_budget
    from pagedweight.serving.plans import calibration_of

    check_target(output)
    checkpoint = Checkpoint.open(path)
    sizes = SizeTable.of(checkpoint.shape, checkpoint.bits)
    index = BlockIndex(len(checkpoint.moe_layers), checkpoint.shape.experts)
    chosen = Policy() if policy_file is None else load_policy(policy_file)
    context = PlanContext.of(index, sizes, calibration_of(checkpoint), chosen)
    size = parse_budget(budget, sizes, index)
    found = make_policy(policy.value, context, size, seed).assign(None)
    save_plan(output, found.bits)
    Console(highlight=False).print(
        f"{output}: {policy.value}, {found.resident_bytes(sizes):,} of {size:,} bytes, "
        f"{found.mean_bits(sizes):.3f} bits a weight"
    )
