"""The bits that the options ask for: a level, a plan file, or a baseline made on the spot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagedweight.checkpoint.plan import load_plan, uniform_plan
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.calibration import Calibration
from pagedweight.core.planner import PlanContext
from pagedweight.core.policies import POLICIES, Assignment, make_policy
from pagedweight.core.policy import Policy
from pagedweight.core.policy_file import load_policy
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.errors import UserError
from pagedweight.serving.expert_budget import parse_budget
from pagedweight.serving.options import ServeOptions

BASELINES = tuple(name for name in POLICIES if name != "paged")
_BASELINE = re.compile(r"([a-z-]+):([^:]+)(?::(.+))?")


@dataclass(frozen=True)
class Baseline:
    """`--plan POLICY:BUDGET[:SEED]`. budget: of all routed experts, as `parse_budget` reads it."""

    policy: str
    budget: str
    seed: int

    @staticmethod
    def of(text: str) -> Baseline | None:
        """None for what is a file, or does not look like a baseline. UserError for a policy that
        is none of BASELINES, one without a budget, and a seed that is no number."""
        if Path(text).exists():
            return None
        if text in BASELINES:
            raise UserError(f"--plan {text} needs a budget, for example {text}:3b or {text}:28.5MB")
        match = _BASELINE.fullmatch(text)
        if match is None:
            return None
        policy, budget, seed = match.groups()
        if policy not in BASELINES:
            raise UserError(
                f"--plan {text}: there is no such file, and {policy!r} is not one of "
                f"{', '.join(BASELINES)}"
                + ("; paged is --memory without --plan" if policy == "paged" else "")
            )
        if seed is not None and not seed.isdecimal():
            raise UserError(f"--plan {text}: the seed {seed!r} is not a whole number of at least 0")
        return Baseline(policy, budget, int(seed or 0))

    def assignment(self, checkpoint: Checkpoint, policy: Policy) -> Assignment:
        """Its bits; `policy` has the floors of static and random. UserError for a small budget."""
        sizes = SizeTable.of(checkpoint.shape, checkpoint.bits)
        index = BlockIndex(len(checkpoint.moe_layers), checkpoint.shape.experts)
        context = PlanContext.of(index, sizes, calibration_of(checkpoint), policy)
        size = parse_budget(self.budget, sizes, index)
        return make_policy(self.policy, context, size, self.seed).assign(None)


def plan_argument(text: str | None) -> str | None:
    """What `--plan` was given: a file's absolute path, a baseline as it is."""
    return text if text is None or Baseline.of(text) else str(Path(text).resolve())


def assignment_of(checkpoint: Checkpoint, options: ServeOptions) -> Assignment:
    """What static precision reads: a baseline, a plan file, a level, or the highest level."""
    if options.plan is None:
        level = options.bits if options.bits is not None else checkpoint.bits[-1]
        return Assignment(uniform_plan(checkpoint, level))
    baseline = Baseline.of(options.plan)
    if baseline is None:
        return Assignment(load_plan(options.plan, checkpoint))
    return baseline.assignment(checkpoint, policy_of(options))


def plan_of(checkpoint: Checkpoint, options: ServeOptions) -> np.ndarray:
    """Bits int8 [L, E, 2] of `assignment_of`. UserError where blocks have two levels at a time."""
    found = assignment_of(checkpoint, options)
    if found.high is not None:
        raise UserError(
            f"--plan {options.plan}: blocks have two levels, token by token, which `serve` and "
            f"`eval --tasks` do; to compare it elsewhere, `eval --policy dynamic-layer`"
        )
    return found.bits


def policy_of(options: ServeOptions) -> Policy:
    """The policy file's policy, or the defaults."""
    return Policy() if options.policy is None else load_policy(Path(options.policy))


def calibration_of(checkpoint: Checkpoint) -> Calibration:
    """Omega_off from the checkpoint's calibration file."""
    found = checkpoint.calibration()
    arrays = {"tokens": found.tokens, "mass": found.mass, "error": found.error, **found.residual}
    if found.sensitivity is not None:
        arrays["sensitivity"] = found.sensitivity
    return Calibration.from_arrays(arrays, checkpoint.bits)
