"""`pagedweight eval --frontier`: quality against bytes for every policy (the paper's Figure 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pagedweight.core.policies import POLICIES
from pagedweight.eval.statistics import Estimate, Floats, bootstrap, paired, perplexity
from pagedweight.eval.stream import StreamScores
from pagedweight.eval.study import ORACLE, Study

BUDGETS = ("2.5b", "2.75b", "3b", "3.5b", "4b", "4.5b", "5b")
CANDIDATES = (*POLICIES, ORACLE)
SOURCE = "bf16"
PAIRS = (
    ("static", "uniform"),
    ("static", "random"),
    ("paged", "static"),
    ("paged", "uniform"),
    ("paged", "random"),
    ("oracle", "static"),
    ("paged", "oracle"),
    ("dynamic-layer", "uniform"),
)
"""Whose KL is compared with whose at equal budgets."""
Tell = Callable[[str, int, int], None]
"""Called with the text, windows done and windows in all."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One policy at one budget on one text: by window, nats, and what it held on average."""

    kl: Floats
    nll: Floats
    mean_bits: float
    resident_bytes: float
    read_bytes: float


@dataclass(frozen=True, eq=False)
class Frontier:
    """cells[text][policy, budget in bytes]; base_nll[text] of the source, by window."""

    model: str
    seed: int
    cells: dict[str, dict[tuple[str, int], Cell]] = field(default_factory=dict)
    base_nll: dict[str, Floats] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of quality.json, KL and perplexity of every cell, the source's perplexity."""
        out = []
        for text, cells in self.cells.items():
            ppl = perplexity(self.base_nll[text], self.seed)
            count = len(self.base_nll[text])
            out.append(self._row(SOURCE, None, None, text, count, "perplexity", ppl))
            for (policy, budget), cell in cells.items():
                bits = round(cell.mean_bits, 4)
                extra = {"resident_bytes": round(cell.resident_bytes)}
                for metric, found in (
                    ("kl", bootstrap(cell.kl, self.seed)),
                    ("perplexity", perplexity(cell.nll, self.seed)),
                ):
                    row = self._row(policy, budget, bits, text, count, metric, found)
                    out.append(row | extra)
        return out

    def _row(
        self,
        policy: str,
        budget: int | None,
        bits: float | None,
        text: str,
        windows: int,
        metric: str,
        found: Estimate,
    ) -> dict[str, Any]:
        return {
            "model": self.model,
            "policy": policy,
            "budget_bytes": budget,
            "mean_bits": bits,
            "text": text,
            "windows": windows,
            "metric": metric,
            "value": found.mean,
            "low": found.low,
            "high": found.high,
        }

    def comparisons(self) -> list[dict[str, Any]]:
        """KL of one policy against another's at equal budgets, paired by window: relative change,
        negative is better; and the share of the oracle's gain over static that paged gets."""
        out = []
        for text, cells in self.cells.items():
            budgets = sorted({budget for _, budget in cells})
            for budget in budgets:
                at = {policy: cell for (policy, b), cell in cells.items() if b == budget}
                for ours, theirs in PAIRS:
                    if ours not in at or theirs not in at:
                        continue
                    _, share = paired([at[ours].kl], [at[theirs].kl], self.seed)
                    names = {"policy": ours, "against": theirs}
                    out.append({"text": text, "budget_bytes": budget, **names, **asdict(share)})
                gains = {"paged", "static", ORACLE} <= at.keys()
                if gains and (at["static"].kl != at[ORACLE].kl).any():
                    out.append({"text": text, "budget_bytes": budget, **self._gain(at)})
        return out

    def _gain(self, at: dict[str, Cell]) -> dict[str, Any]:
        """(static - paged) / (static - oracle) of mean KL, the interval by redrawing windows."""
        kl = np.array([at[name].kl for name in ("static", "paged", ORACLE)])
        rng = np.random.default_rng(self.seed)
        drawn = kl[:, rng.integers(0, kl.shape[1], (10_000, kl.shape[1]))].mean(axis=2)
        share = (drawn[0] - drawn[1]) / (drawn[0] - drawn[2])
        mean = kl.mean(axis=1)
        low, high = np.quantile(share, [0.025, 0.975])
        value = float((mean[0] - mean[1]) / (mean[0] - mean[2]))
        names = {"policy": "paged", "against": "share of the oracle's gain over static"}
        return {**names, "mean": value, "low": float(low), "high": float(high)}


def frontier(
    study: Study,
    budgets: Sequence[str] = BUDGETS,
    policies: Sequence[str] = CANDIDATES,
    tell: Tell = lambda *_: None,
) -> Frontier:
    """Every policy at every budget on every text. Raises UserError for what cannot be."""
    sizes = [study.budget(text) for text in budgets]
    found = Frontier(Path(study.options.model).name, study.options.seed)
    for text in study.tokens:
        keys = [(policy, size) for size in sizes for policy in policies]
        lanes = [study.lane(policy, size, text) for policy, size in keys]
        scores = study.score(text, lanes, lambda done, total, of=text: tell(of, done, total))
        found.base_nll[text] = scores.base_nll
        found.cells[text] = dict(zip(keys, cells_of(scores), strict=True))
    return found


def cells_of(scores: StreamScores) -> Iterator[Cell]:
    """One cell for each lane."""
    for kl, nll, held in zip(scores.kl, scores.nll, scores.held, strict=True):
        yield Cell(
            kl, nll, float(held.bits.mean()), float(held.resident.mean()), float(held.read.mean())
        )
