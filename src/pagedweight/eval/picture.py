"""Pictures of a frontier and of an ablation, from the rows of their JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagedweight.checkpoint.result_file import write_picture
from pagedweight.eval.ablation import ALL, WHOLE

Rows = list[dict[str, Any]]
COLOURS = {
    "uniform": "#8c8c8c",
    "random": "#c7a76c",
    "static": "#3b75af",
    "dynamic-layer": "#8a63a8",
    "paged": "#c23b3b",
    "oracle": "#2f2f2f",
}
MARKERS = {"uniform": "s", "random": "x", "static": "o", "dynamic-layer": "D", "paged": "o"}
LINES = {"oracle": "--", "dynamic-layer": "none"}
"""What dynamic-layer keeps on the device jumps from budget to budget: no line joins its points."""
MB = 1e6
ACROSS = 3


def draw_frontier(rows: Rows, path: Path) -> None:
    """KL to the source against bytes of routed experts on the device, one panel for each text."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    texts = list(dict.fromkeys(row["text"] for row in rows))
    down = -(-len(texts) // ACROSS)
    figure = Figure((4.2 * min(ACROSS, len(texts)), 3.3 * down), layout="constrained")
    axes = figure.subplots(down, min(ACROSS, len(texts)), squeeze=False).ravel()
    for axis, text in zip(axes, texts, strict=False):
        here = [row for row in rows if row["text"] == text and row["metric"] == "kl"]
        for policy, colour in COLOURS.items():
            points = sorted(
                (row for row in here if row["policy"] == policy),
                key=lambda row: row["resident_bytes"],
            )
            if not points:
                continue
            x = [row["resident_bytes"] / MB for row in points]
            low, high = ([row[end] for row in points] for end in ("low", "high"))
            if LINES.get(policy) != "none":
                axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
            axis.plot(
                x,
                [row["value"] for row in points],
                color=colour,
                marker=MARKERS.get(policy),
                markersize=3.5,
                linewidth=1.4 if policy == "paged" else 1.0,
                linestyle=LINES.get(policy, "-"),
                label=policy,
            )
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_title(text, fontsize=10)
        axis.grid(alpha=0.25, which="both", linewidth=0.5)
        axis.tick_params(labelsize=8)
    for axis in axes[len(texts) :]:
        axis.set_visible(False)
    for axis in axes[: len(texts)]:
        axis.set_xlabel("routed experts on the device, MB", fontsize=8)
        axis.set_ylabel("mean KL to bf16, nats", fontsize=8)
    axes[0].legend(fontsize=8, frameon=False)
    write_picture(path, figure)


def draw_ablation(rows: Rows, path: Path) -> None:
    """KL over all texts of every configuration, one group of bars for each budget."""
    from matplotlib.figure import Figure

    over = [row for row in rows if row["text"] == ALL]
    budgets = sorted({row["budget_bytes"] for row in over})
    names = list(dict.fromkeys(row["configuration"] for row in over))
    figure = Figure((3.9 * len(budgets) + 1.6, 2.6), layout="constrained")
    axes = figure.subplots(1, len(budgets), squeeze=False)[0]
    for axis, budget in zip(axes, budgets, strict=True):
        for at, name in enumerate(reversed(names)):
            row = next(
                r for r in over if r["configuration"] == name and r["budget_bytes"] == budget
            )
            mean = row["kl"]["mean"]
            axis.barh(at, mean, color=COLOURS["paged" if name == WHOLE else "uniform"], height=0.65)
            more = row.get("kl_more_share")
            said = (
                f" {mean:.4f}"
                if more is None
                else f" {100 * more['mean']:+.1f}% [{100 * more['low']:+.1f}, "
                f"{100 * more['high']:+.1f}]"
            )
            axis.text(mean, at, said, va="center", fontsize=7.5)
        axis.set_yticks(range(len(names)), list(reversed(names)), fontsize=8)
        axis.set_xlim(0, 1.6 * max(r["kl"]["mean"] for r in over if r["budget_bytes"] == budget))
        axis.set_title(f"{budget / MB:.1f} MB of routed experts", fontsize=9)
        axis.set_xlabel("mean KL to bf16 over the texts, nats", fontsize=8)
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    write_picture(path, figure)
