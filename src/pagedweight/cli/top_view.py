"""One frame of `pagedweight top`. Parts of a bar differ in shape, not in colour alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pagedweight.runtime.metrics import View
    from pagedweight.runtime.timeline import Sample
    from pagedweight.runtime.watch import History

WIDTH = 48
STALE_SECONDS = 10.0


def frame(view: View, history: History, now: float, note: str = "") -> RenderableType:
    """What `view` says, with rates of `history`.

    now: epoch seconds; note: a fault to show below.
    """
    sample = view.sample
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for kind, bits in (
        ("bits", sample.bits),
        ("  gate_up", sample.bits_gate_up),
        ("  down", sample.bits_down),
    ):
        table.add_row(kind, _bits_bar(bits, view.levels))
    table.add_row()
    for name, text in zip(("memory", "", ""), _memory(view), strict=True):
        table.add_row(name, text)
    table.add_row()
    for name, text in _lines(view, history):
        table.add_row(name, text)
    parts: list[RenderableType] = [_head(view, now), "", table]
    if note:
        parts += ["", Text(note, style="bold red")]
    return Group(*parts)


def _head(view: View, now: float) -> Text:
    sample = view.sample
    clock = time.strftime("%H:%M:%S", time.localtime(sample.time))
    text = Text.assemble(
        (view.model, "bold"), f"  {view.precision}, step {sample.step:,}, at {clock}"
    )
    if now - sample.time > STALE_SECONDS:
        text.append(f", {now - sample.time:,.0f} s ago", style="yellow")
    return text


def _bits_bar(bits: float, levels: tuple[int, ...]) -> Text:
    filled = round(WIDTH * bits / levels[-1])
    return Text.assemble(
        ("█" * filled, "blue"),
        ("░" * (WIDTH - filled), "dim"),
        f" {bits:.2f} of {levels[-1]}",
    )


def _memory(view: View) -> tuple[Text, Text, Text]:
    """The bar, and what its parts are in two lines."""
    sample, total = view.sample, view.budget.total
    held = sample.kv_bytes * sample.kv_used // max(1, sample.kv_usable)
    parts = (
        ("█", "blue", "weights", sample.device_bytes + sample.transfer_bytes),
        ("▓", "dark_orange", "KV held", held),
        ("▒", "yellow", "KV free", sample.kv_bytes - held),
        ("░", "green", "unassigned", sample.free_bytes),
        ("╳", "dim", "reserve", view.budget.reserve),
    )
    bar, legends, ends, done = Text(), (Text(), Text()), 0, 0
    for number, (mark, style, name, nbytes) in enumerate(parts):
        ends += nbytes
        upto = min(WIDTH, round(WIDTH * ends / total))
        bar.append(mark * (upto - done), style=style)
        legends[number // 3].append(mark, style=style).append(f" {name} {size(nbytes)}   ")
        done = max(done, upto)
    bar.append("·" * (WIDTH - done), style="dim")
    bar.append(f" {size(total)}")
    return bar, *legends


def _lines(view: View, history: History) -> list[tuple[str, str]]:
    sample: Sample = view.sample
    gained = sample.kv_usable - view.usable_at_start

    def rate(name: str, unit: str = "") -> str:
        found = history.rate(name)
        if found is None:
            return "-"
        return f"{size(found)}/s" if unit == "bytes" else f"{found:,.1f}/s"

    pressure = (
        f"pressure, {size(sample.target_bytes)} wanted of weights"
        if sample.target_bytes
        else "no pressure"
    )
    return [
        (
            "KV blocks",
            f"{sample.kv_used:,} held of {sample.kv_usable:,} backed ({gained:+,} since the start)"
            f", {sample.kv_reachable:,} reachable; {sample.kv_demanded:,} demanded",
        ),
        (
            "requests",
            f"{sample.running:,} running, {sample.waiting:,} waiting; {sample.preemptions:,} "
            f"preempted ({rate('preemptions')})",
        ),
        (
            "tokens",
            f"generated {sample.tokens_generated:,} ({rate('tokens_generated')}), scheduled "
            f"{sample.tokens_scheduled:,} ({rate('tokens_scheduled')})",
        ),
        (
            "transitions",
            f"lowered {sample.rows_lowered:,} ({rate('rows_lowered')}), raised "
            f"{sample.rows_raised:,} ({rate('rows_raised')}); uploaded "
            f"{size(sample.copied_bytes)} ({rate('copied_bytes', 'bytes')}); "
            f"{sample.rollbacks:,} rolled back",
        ),
        (
            "planner",
            f"{pressure}; {sample.rows_waiting:,} linear blocks to move, {sample.batches:,} "
            f"transitions under way; {sample.floor_hits:,} floor hits",
        ),
        (
            "damage",
            f"{_number(sample.damage)} predicted for these bits; "
            f"{_number(sample.damage_taken)} taken by all plans",
        ),
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} GiB"
