"""The operator's picture of a timeline: KV blocks, bits, and what requests got, over time.

Several timelines stand beside each other on the same axes. Colours are those of Okabe and Ito
("Color Universal Design", 2008), which stay apart for every kind of colour vision.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from pagedweight.checkpoint.result_file import check_picture, write_picture
from pagedweight.errors import UserError
from pagedweight.runtime.timeline import Timeline

BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
PALE, GREY, INK = "#B9DDF5", "#8A8A8A", "#202020"
SHADE = {"offload": (ORANGE, 0.25), "reload": (GREEN, 0.18)}
DOTS = (0, (1, 2))
# Inches: of a panel, left of the first, between two, of the legends, above and below.
PANEL, LEFT, GAP, LEGEND, ABOVE, BELOW, HEIGHT = 6.0, 0.95, 0.25, 2.35, 1.1, 0.6, 8.2
PHASE_BINS = 240
RATE_BINS = 60
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """A timeline cut to where something happens; `seconds` count from the first request."""

    timeline: Timeline
    label: str
    seconds: Floats
    first: int
    last: int

    @staticmethod
    def of(timeline: Timeline, label: str) -> Series:
        """UserError when no request was ever there."""
        asked = timeline.column("running") + timeline.column("waiting") > 0
        if not asked.any():
            raise UserError(f"{timeline.name}: no request in it, so there is nothing to draw")
        times = timeline.column("monotonic")
        state = np.stack([timeline.column(n) for n in ("bits", "kv_usable", "kv_used", "running")])
        changed = np.flatnonzero((np.diff(state) != 0).any(axis=0)) + 1
        first = int(np.argmax(asked))
        last = max(int(changed[-1]) if changed.size else 0, int(np.flatnonzero(asked)[-1]))
        return Series(timeline, label, times - times[first], max(0, first - 1), last)

    def column(self, name: str) -> Floats:
        return self.timeline.column(name)[self.first : self.last + 1]

    @property
    def times(self) -> Floats:
        """Seconds of the samples that are drawn; the one before the first request stands at it."""
        return np.maximum(self.seconds[self.first : self.last + 1], 0.0)

    @property
    def end(self) -> float:
        return float(self.times[-1])

    def mean(self, name: str) -> float:
        """Mean over time: a sample holds until the next."""
        widths, values = np.diff(self.times), self.column(name)
        return float(values[:-1] @ widths / widths.sum()) if widths.sum() else float(values[-1])

    def total(self, name: str) -> float:
        """How much a total grew."""
        values = self.column(name)
        return float(values[-1] - values[0])

    def rate(self, name: str) -> tuple[Floats, Floats]:
        """(edges in seconds, growth of a total a second between them)."""
        edges = np.linspace(0.0, max(self.end, 1e-3), RATE_BINS + 1)
        totals = np.interp(edges, self.times, self.column(name))
        return edges, np.diff(totals) / np.diff(edges)

    def phases(self) -> list[tuple[str, float, float]]:
        """("offload" or "reload", from, to) in seconds: where on balance bits fell or rose."""
        edges = np.linspace(0.0, max(self.end, 1e-3), PHASE_BINS + 1)
        change = np.interp(edges, self.times, self.column("rows_raised")) - np.interp(
            edges, self.times, self.column("rows_lowered")
        )
        signs = np.sign(np.round(np.diff(change), 6))
        found: list[tuple[str, float, float]] = []
        for sign, start, end in zip(signs, edges[:-1], edges[1:], strict=True):
            if not sign:
                continue
            kind = "reload" if sign > 0 else "offload"
            near = start - found[-1][2] < 3 * (end - start) if found else False
            if found and near and found[-1][0] == kind:
                found[-1] = (kind, found[-1][1], end)
            else:
                found.append((kind, start, end))
        return found


def draw(timelines: Sequence[Timeline], labels: Sequence[str], path: Path) -> None:
    """Write the picture. Raises UserError on a format or folder that cannot be written."""
    check_picture(path)
    series = [Series.of(t, label) for t, label in zip(timelines, labels, strict=True)]
    count = len(series)
    width = LEFT + count * (PANEL + GAP) + LEGEND
    figure = Figure(figsize=(width, HEIGHT))
    grid = figure.add_gridspec(
        3,
        count + 1,
        height_ratios=(3.2, 2.4, 1.5),
        width_ratios=(*[PANEL] * count, LEGEND),
        left=LEFT / width,
        right=1.0,
        bottom=BELOW / HEIGHT,
        top=1 - ABOVE / HEIGHT,
        hspace=0.08,
        wspace=GAP * (count + 1) / (width - LEFT - GAP * count),
    )
    axes = np.empty((3, count), object)
    for row, column in np.ndindex(3, count):
        shared = {"sharex": axes[0, 0], "sharey": axes[row, 0]} if row or column else {}
        axes[row, column] = figure.add_subplot(grid[row, column], **shared)
        axes[row, column].tick_params(labelbottom=row == 2, labelleft=column == 0)
    for column, one in enumerate(series):
        _kv(axes[0, column], one)
        _bits(axes[1, column], one)
        _requests(axes[2, column], one)
        for axis in axes[:, column]:
            _shade(axis, one)
            _clean(axis)
        _head(axes[0, column], one)
        axes[2, column].set_xlabel("seconds since the first request")
    end = max(one.end for one in series)
    axes[0, 0].set_xlim(-0.01 * end, 1.01 * end)
    _limits(axes, series)
    _names(axes[:, 0], series)
    _legends([figure.add_subplot(grid[row, count]) for row in range(3)])
    figure.align_ylabels(axes[:, 0])
    figure.text(
        LEFT / width, 1 - 0.35 / HEIGHT, _title(series), fontsize=14, fontweight="bold", color=INK
    )
    write_picture(path, figure)


def _kv(axis: Axes, one: Series) -> None:
    times = one.times
    axis.fill_between(times, one.column("kv_used"), step="post", color=PALE, lw=0)
    axis.step(times, one.column("kv_demanded"), where="post", color=RED, lw=1.3)
    axis.step(times, one.column("kv_usable"), where="post", color=INK, lw=2.0)
    if one.timeline.header.precision == "elastic":
        axis.axhline(one.timeline.header.reachable, color=GREY, lw=1.4, ls=DOTS)


def _bits(axis: Axes, one: Series) -> None:
    times = one.times
    for level in one.timeline.header.levels:
        axis.axhline(level, color="#DDDDDD", lw=0.8, zorder=0)
    axis.step(times, one.column("bits_gate_up"), where="post", color=PURPLE, lw=1.0)
    axis.step(times, one.column("bits_down"), where="post", color=GREEN, lw=1.0)
    axis.step(times, one.column("bits"), where="post", color=BLUE, lw=2.2)


def _requests(axis: Axes, one: Series) -> None:
    edges, rate = one.rate("tokens_generated")
    axis.stairs(rate, edges, color=BLUE, lw=1.4, fill=False)
    happened = np.flatnonzero(np.diff(one.column("preemptions")) > 0) + 1
    times = one.times[happened]
    at = axis.get_xaxis_transform()
    axis.plot(times, np.full(times.size, 0.93), "v", color=RED, ms=6, transform=at, clip_on=False)


def _shade(axis: Axes, one: Series) -> None:
    for kind, start, end in one.phases():
        color, alpha = SHADE[kind]
        axis.axvspan(start, end, color=color, alpha=alpha, lw=0, zorder=0)


def _clean(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(colors=INK, labelsize=9)
    axis.grid(axis="x", color="#EEEEEE", lw=0.8)
    axis.set_axisbelow(True)


def _limits(axes: Any, series: Sequence[Series]) -> None:
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].yaxis.set_major_locator(MaxNLocator(6, integer=True))
    levels = sorted({level for one in series for level in one.timeline.header.levels})
    axes[1, 0].set_ylim(levels[0] - 0.3, levels[-1] + 0.3)
    axes[1, 0].yaxis.set_major_locator(FixedLocator(levels))
    fastest = max(float(one.rate("tokens_generated")[1].max()) for one in series)
    axes[2, 0].set_ylim(0, 1.35 * fastest or 1.0)  # markers of preemptions stand above the line
    axes[2, 0].yaxis.set_major_locator(MaxNLocator(4))
    axes[2, 0].yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _names(axes: Sequence[Axes], series: Sequence[Series]) -> None:
    heads = [one.timeline.header for one in series]
    kinds = {f"({h.block_tokens} tokens, {_size(h.block_bytes)} each)" for h in heads}
    axes[0].set_ylabel("KV cache blocks\n" + (kinds.pop() if len(kinds) == 1 else ""))
    axes[1].set_ylabel("mean bits of\nexpert weights")
    axes[2].set_ylabel("generated\ntokens/s")


def _legends(axes: Sequence[Axes]) -> None:
    """What is what, in a column of its own beside the data."""
    shades = [
        Patch(color=SHADE["offload"][0], alpha=0.35, label="bits are lowered, KV gains"),
        Patch(color=SHADE["reload"][0], alpha=0.3, label="bits return, KV gives back"),
    ]
    entries: tuple[list[Any], ...] = (
        [
            Line2D([], [], color=GREY, lw=1.4, ls=DOTS, label="most that could be backed"),
            Line2D([], [], color=INK, lw=2.0, label="backed by memory"),
            Line2D(
                [], [], color=RED, lw=1.3, label="demanded: held, and what\nwaiting prompts need"
            ),
            Patch(color=PALE, label="held by requests"),
            *shades,
        ],
        [
            Line2D([], [], color=BLUE, lw=2.2, label="all expert weights"),
            Line2D([], [], color=PURPLE, lw=1.0, label="gate and up projections"),
            Line2D([], [], color=GREEN, lw=1.0, label="down projections"),
            Line2D([], [], color="#DDDDDD", lw=0.8, label="levels in the checkpoint"),
        ],
        [
            Line2D([], [], color=BLUE, lw=1.4, label="generated tokens/s"),
            Line2D([], [], color=RED, marker="v", ls="", ms=6, label="requests preempted"),
        ],
    )
    for axis, handles in zip(axes, entries, strict=True):
        axis.axis("off")
        axis.legend(handles=handles, loc="upper left", frameon=False, fontsize=9, borderaxespad=0.0)


def _title(series: Sequence[Series]) -> str:
    heads = [one.timeline.header for one in series]
    models = ", ".join(dict.fromkeys(head.model for head in heads))
    budgets = " or ".join(dict.fromkeys(_size(head.budget.total) for head in heads))
    return f"{models}: expert weights and KV cache share {budgets} of memory"


def _head(axis: Axes, one: Series) -> None:
    """The label, and below it the run in one line."""
    seconds, preempted = max(one.end, 1e-9), int(one.total("preemptions"))
    bits = one.column("bits")
    span = f"{bits.min():.2f} to {bits.max():.2f} bits, mean {one.mean('bits'):.2f}"
    parts = (
        span if np.ptp(bits) else f"{bits[0]:.2f} bits throughout",
        f"{preempted} preemption{'s' * (preempted != 1)}",
        f"{one.total('tokens_generated') / seconds:,.0f} tokens/s over {seconds:.1f} s",
    )
    label = textwrap.shorten(one.label, 56, placeholder="...")
    axis.set_title(label, fontsize=12, fontweight="bold", loc="left", color=INK, pad=24)
    axis.text(0, 1.03, "  ·  ".join(parts), transform=axis.transAxes, fontsize=10, color=INK)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
