"""The search: knobs turned one after another, each to its best value, until none moves.

Small on purpose: trials are few, so a finer search would fit their noise. A new value must be
better by MARGIN, so that what makes no difference stays at its default. The result is judged on
sequences that the search never saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pagedweight.calibrate.measurements import FloatArray, Measurements
from pagedweight.calibrate.search.folds import Split, check_trials, search_trials
from pagedweight.calibrate.search.knobs import RANGES, Knobs, policy_of
from pagedweight.calibrate.search.objective import Objective
from pagedweight.core.policy import Policy
from pagedweight.core.size_table import BlockIndex, SizeTable

MARGIN = 0.01
ROUNDS = 3
Tell = Callable[[int], None]
"""Called with the number of policies tried since the last call."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """policy: the winner. knobs: its position. tried: every position with its score. check: rows
    for held-out sequences, see `_check`."""

    policy: Policy
    knobs: Knobs
    tried: list[dict[str, Any]]
    check: list[dict[str, Any]]
    trials: list[dict[str, Any]]


def search_policy(
    measured: Measurements,
    levels: Sequence[int],
    sizes: SizeTable,
    base: Policy,
    seed: int,
    tell: Tell = lambda _: None,
) -> SearchResult:
    """The best policy found for these measurements; all but the knobs is as in `base`.

    Raises UserError when there are too few sequences.
    """
    split = Split.of(measured.sequences, seed)
    index = BlockIndex(*measured.mass.shape[2:])
    objective = Objective(search_trials(measured, levels, split, seed), sizes, index, base)
    tried: dict[Knobs, float] = {}

    def score(knobs: Knobs) -> float:
        if knobs not in tried:
            tried[knobs] = objective.score(objective.damage(policy_of(knobs, base)))
            tell(1)
        return tried[knobs]

    best = Knobs()
    for _ in range(ROUNDS):
        start = best
        for name, values in RANGES.items():
            for value in values:
                turned = replace(best, **{name: value})
                if score(turned) < score(best) - MARGIN:
                    best = turned
        if best == start:
            break
    check = Objective(check_trials(measured, levels, split, seed), sizes, index, base)
    return SearchResult(
        policy=policy_of(best, base),
        knobs=best,
        tried=[asdict(knobs) | {"score": value} for knobs, value in tried.items()],
        check=_check(check, {"default": base, "found": policy_of(best, base)}),
        trials=_described(objective) + _described(check),
    )


def _described(objective: Objective) -> list[dict[str, Any]]:
    return [
        {"name": trial.name, "texts": len(trial.cases), "distance": trial.distance}
        for trial in objective.trials
    ]


def _check(objective: Objective, policies: dict[str, Policy]) -> list[dict[str, Any]]:
    """A row for each kind of trial, budget and policy: measured damage over static's, and the share
    of the oracle's gain over static."""
    damage = {name: objective.damage(policy) for name, policy in policies.items()}
    damage["oracle"] = objective.yardstick.oracle
    shifted = np.array([trial.shifted for trial in objective.trials])
    return [
        row
        for kind, of in (("in-domain", ~shifted), ("shifted", shifted))
        if of.any()
        for name, found in damage.items()
        for row in _rows(objective, kind, of, name, found)
    ]


def _rows(
    objective: Objective, kind: str, of: Any, name: str, found: FloatArray
) -> list[dict[str, Any]]:
    static, oracle = objective.yardstick.static, objective.yardstick.oracle
    out = []
    for column, bits in enumerate(objective.budget_bits):
        ratio = np.exp(np.log(found[of, column] / static[of, column]).mean())
        least = np.exp(np.log(oracle[of, column] / static[of, column]).mean())
        gain = (1 - ratio) / (1 - least) if least < 1 else 0.0
        out.append(
            {
                "trial": kind,
                "policy": name,
                "budget_bits": bits,
                "damage_over_static": float(ratio),
                "share_of_oracle_gain": float(gain),
            }
        )
    return out
