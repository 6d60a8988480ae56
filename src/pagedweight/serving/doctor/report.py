"""All findings in order, and the text to paste."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagedweight.serving.doctor.checkpoint import checkpoint
from pagedweight.serving.doctor.finding import Finding
from pagedweight.serving.doctor.gpu import gpus
from pagedweight.serving.doctor.kernels import kernels
from pagedweight.serving.doctor.machine import folders, memory, processor
from pagedweight.serving.doctor.plugin import plugin
from pagedweight.serving.doctor.versions import versions

_MARK = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def diagnose(out: Path | None, progress: Callable[[str], None]) -> list[Finding]:
    """Everything; `progress` hears what is looked at next. `out`: a checkpoint to try, or None."""
    return list(_findings(out, progress))


def _findings(out: Path | None, progress: Callable[[str], None]) -> Iterator[Finding]:
    about = [] if out is None else [checkpoint(out)]
    if not healthy(about):
        out = None  # an engine on it would only say again what is broken
    looks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("versions", versions),
        ("machine", lambda: [processor(), memory(), folders()]),
        ("gpu", gpus),
        ("kernels", kernels),
        ("checkpoint", lambda: about),
        ("plugin" if out is None else "plugin and engine", lambda: plugin(out)),
    ]
    for name, look in looks:
        progress(name)
        yield from look()


def healthy(findings: Sequence[Finding]) -> bool:
    """Whether nothing is wrong; notes do not count."""
    return all(finding.status != "wrong" for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """Plain lines, to read and to paste into a bug report: no colours, no host name."""
    width = max(len(finding.name) for finding in findings)
    lines = ["pagedweight doctor"]
    for finding in findings:
        lines.append(f"{_MARK[finding.status]} {finding.name.ljust(width)}  {finding.said}")
        if finding.way_out:
            lines.append(f"{' ' * (width + 6)}  -> {finding.way_out}")
    wrong = sum(finding.status == "wrong" for finding in findings)
    lines.append("everything is well" if not wrong else f"{wrong} wrong; paste this when you ask")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same with the numbers, and the text."""
    return {
        "healthy": healthy(findings),
        "findings": [asdict(finding) for finding in findings],
        "text": as_text(findings),
    }
