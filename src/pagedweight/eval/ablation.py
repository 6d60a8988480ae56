"""`pagedweight eval --ablation`: the planner without one of its parts (the paper's Table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pagedweight.core.policy import Policy
from pagedweight.eval.frontier import Cell, Tell, cells_of
from pagedweight.eval.statistics import Estimate, over_texts, paired, perplexity
from pagedweight.eval.study import Study

WHOLE = "paged"
WITHOUT = {
    "w/o routing statistics": "use_routing",
    "w/o prompt residual": "use_residual",
    "w/o page movement": "use_movement",
    "w/o global sensitivity": "use_sensitivity",
}
"""The paper's names to the policy's switches."""
PERPLEXITIES = {"wikitext2": "wikitext2_ppl", "c4": "c4_ppl"}
ALL = "all"
"""The texts together, each weighing the same."""


@dataclass(frozen=True, eq=False)
class Ablation:
    """cells[budget in bytes][text][configuration]."""

    seed: int
    cells: dict[int, dict[str, dict[str, Cell]]]

    def rows(self) -> list[dict[str, Any]]:
        """The rows of ablation.json: KL by text and over all, against the whole, perplexities."""
        out = []
        for budget, texts in self.cells.items():
            for name in (WHOLE, *WITHOUT):
                ppl = {
                    column: _row(perplexity(texts[text][name].nll, self.seed))
                    for text, column in PERPLEXITIES.items()
                    if text in texts
                }
                for text in (*texts, ALL):
                    of = list(texts) if text == ALL else [text]
                    ours = [texts[t][name].kl for t in of]
                    whole = [texts[t][WHOLE].kl for t in of]
                    row = {"configuration": name, "budget_bytes": budget, "text": text}
                    row |= {"kl": _row(over_texts(ours, self.seed))}
                    if name != WHOLE:
                        difference, share = paired(ours, whole, self.seed)
                        row |= {"kl_more": _row(difference), "kl_more_share": _row(share)}
                    out.append(row | (ppl if text == ALL else {}))
        return out


def _row(found: Estimate) -> dict[str, float]:
    return asdict(found)


def configurations(policy: Policy) -> dict[str, Policy]:
    """The policy whole, and without each of its parts."""
    parts = {name: replace(policy, **{switch: False}) for name, switch in WITHOUT.items()}
    return {WHOLE: policy, **parts}


def ablation(study: Study, budgets: Sequence[str], tell: Tell = lambda *_: None) -> Ablation:
    """Every configuration at every budget on every text."""
    sizes = [study.budget(text) for text in budgets]
    found: dict[int, dict[str, dict[str, Cell]]] = {size: {} for size in sizes}
    named = configurations(study.policy)
    for text in study.tokens:
        keys = [(size, name) for size in sizes for name in named]
        lanes = [study.lane("paged", size, text, named[name]) for size, name in keys]
        scores = study.score(text, lanes, lambda done, total, of=text: tell(of, done, total))
        for (size, name), cell in zip(keys, cells_of(scores), strict=True):
            found[size].setdefault(text, {})[name] = cell
    return Ablation(study.options.seed, found)
