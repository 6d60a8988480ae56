"""`pagedweight inspect --policy`: what a policy file tells the planner, in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from pagedweight.core.policy import Policy

NUMBERS = {
    "alpha": "strength of the prompt residual; 0 switches eta off",
    "epsilon": "least damage of a step, as a share of the mean",
    "prior_tokens": "tokens of calibration mixed into what was observed",
    "offload_blocks": "at this many free KV blocks or fewer, bits give way",
    "reload_blocks": "bits come back while more than this many stay free",
    "dwell_steps": "steps without pressure before bits come back",
    "offload_pages_per_step": "most planes that one plan lowers",
    "reload_pages_per_step": "most planes that one plan brings back",
    "exchange_ratio": "gain over harm at which bits change places at a constant load; 0: never",
}
SWITCHES = ("allow_emergency", "use_routing", "use_residual", "use_movement", "use_sensitivity")


def show_policy(path: Path, as_json: bool) -> None:
    """Print a policy file, defaults filled in. Raises UserError when it is not sound."""
    from rich.console import Console

    from pagedweight.core.policy_file import load_policy, policy_to_json

    policy = load_policy(path)
    if as_json:
        print(json.dumps(json.loads(policy_to_json(policy)), indent=1))
        return
    console = Console(highlight=False)
    console.print(f"[bold]{path}[/bold]: policy of {len(policy.buckets)} routing buckets")
    console.print(_buckets(policy))
    for stage in policy.stages:
        cap, least = stage.depth_cap, stage.least_bits
        depth = "" if cap is None else f", at most {cap} levels below resting bits at first"
        kept = "" if least is None else f", all together keep the bytes of {least} bits"
        when = "instead of a preemption only" if stage.emergency else "in this order"
        console.print(f"  stage {stage.name}: {when}{depth}{kept}")
    for name, meaning in NUMBERS.items():
        console.print(f"  {name} {getattr(policy, name):g}: {meaning}")
    off = [name for name in SWITCHES if not getattr(policy, name)]
    console.print(f"  switched off: {', '.join(off) if off else 'nothing'}")


def _buckets(policy: Policy) -> Table:
    """A line for each bucket: mass over calibration's mass, multiplier, floors by stage."""
    from rich.table import Table

    table = Table(title="floors in bits by stage", title_justify="left", box=None)
    table.add_column("mass / calibration's", justify="right")
    table.add_column("damage x", justify="right")
    for stage in policy.stages:
        table.add_column(stage.name, justify="right")
    ends = [bucket.at_least for bucket in policy.buckets[1:]]
    for number, bucket in enumerate(policy.buckets):
        upto = f"{ends[number]:.3g}" if number < len(ends) else "more"
        floors = [str(stage.floors[number]) for stage in policy.stages]
        span = f"{bucket.at_least:.3g} to {upto}"
        table.add_row(span, f"{bucket.multiplier:.3g}", *floors)
    return table
