"""`pagedweight eval` over policies: one or several, the frontier, the ablation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedweight.errors import UserError, listing

if TYPE_CHECKING:
    from rich.console import Console

    from pagedweight.eval.study import Study, StudyOptions
    from pagedweight.eval.windows import WindowChoice


@dataclass(frozen=True)
class Asked:
    """The options that choose a study, and where its results go."""

    policies: str | None
    budgets: str | None
    frontier: bool
    ablation: bool
    output: Path | None
    picture: Path | None
    per_window: Path | None
    pressure: Path | None = None

    def check(self) -> None:
        """Raises UserError for options that do not go together, and for files that cannot be."""
        from pagedweight.checkpoint.result_file import check_picture, check_target
        from pagedweight.eval.frontier import CANDIDATES

        modes = [
            name
            for name, given in (
                ("--policy", self.policies is not None),
                ("--frontier", self.frontier),
                ("--ablation", self.ablation),
            )
            if given
        ]
        if len(modes) > 1:
            raise UserError(f"{' and '.join(modes)} exclude each other: run eval for each")
        if self.pressure is not None and (self.policies is None or self.budgets is not None):
            raise UserError("--pressure goes with --policy, and takes the place of --budget")
        if self.policies is not None and (self.budgets, self.pressure) == (None, None):
            raise UserError("--policy needs --budget, for example --budget 3b or 28.5MB")
        if self.ablation and self.per_window is not None:
            raise UserError("--per-window goes with --policy and --frontier, not with --ablation")
        unknown = [name for name in self.names() if name not in CANDIDATES]
        if unknown:
            raise UserError(
                f"policy {listing(map(repr, unknown))} is not one of {listing(CANDIDATES)}"
            )
        for path in (self.output, self.per_window):
            if path is not None:
                check_target(path)
        if self.picture is not None:
            check_picture(self.picture)

    def names(self) -> tuple[str, ...]:
        """The policies asked for, each once."""
        from pagedweight.eval.frontier import CANDIDATES

        if self.policies is None:
            return CANDIDATES
        return tuple(dict.fromkeys(name.strip() for name in self.policies.split(",")))


def study_options(
    path: Path,
    model: Path | None,
    texts: tuple[tuple[str, WindowChoice], ...],
    under: tuple[Path | None, Any, int | None, Path | None, str | None, str, int],
    seed: int,
    oracle_windows: int,
) -> StudyOptions:
    """`under`: policy file, load, replan tokens, pressure, dtype, device, seats. UserError."""
    from pagedweight.eval.study import StudyOptions

    policy_file, load, replan_tokens, pressure, dtype, device, seats = under
    if model is None:
        raise UserError("policies are judged by their KL to the source: give --model")
    return StudyOptions(
        path=path,
        model=model,
        texts=texts,
        policy=policy_file,
        load=load,
        replan_tokens=replan_tokens,
        pressure=pressure,
        dtype=dtype or "float32",
        device=device,
        seats=seats,
        seed=seed,
        oracle_windows=oracle_windows,
    )


def run_study(options: StudyOptions, asked: Asked, as_json: bool) -> None:
    """Measure, print, and write what was asked for."""
    from rich.console import Console
    from rich.progress import Progress

    from pagedweight.eval.results import ablation_record, frontier_record, setting, write_results
    from pagedweight.eval.study import Study

    asked.check()
    study = Study(options)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("windows", total=None)

        def tell(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        if asked.ablation:
            record = ablation_record(setting(study), *_ablation(study, asked, tell))
        else:
            record = frontier_record(setting(study), *_frontier(study, asked, tell))
    if asked.output:
        write_results(asked.output, record)
    if as_json:
        print(json.dumps(record))
    else:
        (_show_ablation if asked.ablation else _show_frontier)(record, Console(highlight=False))


def _budgets(asked: Asked, default: Sequence[str]) -> list[str]:
    given = default if asked.budgets is None else asked.budgets.split(",")
    return list(dict.fromkeys(budget.strip() for budget in given))


def _frontier(study: Study, asked: Asked, tell: Any) -> tuple[Any, ...]:
    from pagedweight.eval.frontier import BUDGETS, frontier
    from pagedweight.eval.picture import draw_frontier
    from pagedweight.eval.results import save_windows

    budgets = _budgets(asked, BUDGETS)
    if study.pressure:
        budgets = [f"{min(map(min, study.pressure.values()))}"]
    found = frontier(study, budgets, asked.names(), tell)
    rows = found.rows()
    if asked.picture:
        draw_frontier(rows, asked.picture)
    if asked.per_window:
        save_windows(asked.per_window, found)
    return rows, found.comparisons()


def _ablation(study: Study, asked: Asked, tell: Any) -> tuple[Any, ...]:
    from pagedweight.eval.ablation import ablation
    from pagedweight.eval.picture import draw_ablation

    rows = ablation(study, _budgets(asked, ("2.5b", "3b")), tell).rows()
    if asked.picture:
        draw_ablation(rows, asked.picture)
    return (rows,)


def _show_frontier(record: dict[str, Any], console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found: dict[tuple[str, int | None, str], dict[str, Any]] = {}
    for row in record["rows"]:
        key = (row["text"], row["budget_bytes"], row["policy"])
        found.setdefault(key, {})[row["metric"]] = row
    table = Table(box=SIMPLE_HEAD)
    for name in ("text", "policy", "budget", "on device", "bits", "perplexity", "KL, nats"):
        table.add_column(name, justify="left" if name in ("text", "policy") else "right")
    for (text, budget, policy), of in found.items():
        ppl = of["perplexity"]
        shown = ["", "", ""]
        if budget is not None:
            shown = [f"{budget / 1e6:.1f} MB", f"{ppl['resident_bytes'] / 1e6:.1f} MB"]
            shown.append(f"{ppl['mean_bits']:.2f}")
        table.add_row(text, policy, *shown, _estimate(ppl, 2), _estimate(of.get("kl"), 4))
    console.print(table)
    console.print("in brackets: 95% interval, bootstrap over windows")


def _show_ablation(record: dict[str, Any], console: Console) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for name in ("budget", "configuration", "text", "KL, nats", "more than whole"):
        table.add_column(name, justify="right" if "," in name or "more" in name else "left")
    for row in record["rows"]:
        kl, more = row["kl"], row.get("kl_more_share")
        shown = f"{kl['mean']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]"
        apart = "" if more is None else "{mean:+.1%} [{low:+.1%}, {high:+.1%}]".format(**more)
        size = f"{row['budget_bytes'] / 1e6:.1f} MB"
        table.add_row(size, row["configuration"], row["text"], shown, apart)
    console.print(table)
    console.print("in brackets: 95% interval, bootstrap over windows of each text")


def _estimate(row: dict[str, Any] | None, digits: int) -> str:
    if row is None:
        return ""
    low, high = row["low"], row["high"]
    return f"{row['value']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
