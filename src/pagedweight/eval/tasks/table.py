"""What `eval --tasks` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def show_tasks(report: dict[str, Any], console: Console) -> None:
    """A line for each task, and below the table everything a reader must know of the numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console.print(
        f"[bold]{report['path']}[/bold]: {_precision(report['precision'])}, vLLM, "
        f"context {report['context']:,}, lm-eval {report['lm_eval']}"
    )
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for name in ("task", "score", "value", "items", "cut"):
        left = name in ("task", "score")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in report["tasks"]:
        mark = "*" if row["caveat"] else ""
        value = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        items = f"{row['items']}/{row['items_in_file']}"
        table.add_row(row["label"] + mark, row["metric"], value, items, str(row["truncated"]))
    console.print(table)
    console.print(
        "in brackets: 95% interval over items (Wilson's for right or wrong, else bootstrap)"
    )
    if any(row["truncated"] for row in report["tasks"]):
        console.print("cut: prompts too long for the context, whose middle was left out")
    for row in report["tasks"]:
        if row["caveat"]:
            console.print(f"* {row['label']}: {row['caveat']}", soft_wrap=True)


def _precision(precision: dict[str, Any] | None) -> str:
    if precision is None:
        return "unquantized"
    if "budget_bytes" in precision:
        lowest = precision["lowest_mean_bits"]
        return (
            f"{precision['mean_bits']:.2f} bits over time, {lowest:.2f} at the lowest, in "
            f"{precision['budget_bytes']:,} bytes"
        )
    return f"{precision['mean_bits']:.2f} bits, experts {precision['expert_bytes'] / 1e6:.1f} MB"
