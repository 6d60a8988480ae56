"""What the scheduler process and the ranks tell each other, once a step (DESIGN decision 9).

    scheduler --StepPlan--> every rank: applied on entry to the step, before anything is launched
    scheduler <--WorkerReport-- rank:   how things stand after that

Both are small, picklable and versioned. They state what is wanted and what is so, not what changed,
so a message may be repeated; they arrive in order. `merged` is what all ranks agree on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

MESSAGE_VERSION = 3


class Stage(IntEnum):
    """How far a batch is on a rank. Up to READY it can be aborted."""

    FAILED = 0
    COPYING = 1
    READY = 2
    COMMITTED = 3
    DONE = 4


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that change bits together or not at all; all are lowered or all are raised.

    number: grows by one with each batch. rows, bits: row numbers and the levels they go to.
    """

    number: int
    lowers: bool
    rows: tuple[int, ...]
    bits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the ranks do on entry to step `step`, in this order.

    abort:   batches that are given up; unknown or finished ones are ignored.
    commit:  batches whose bits change now. A rank that is not READY leaves it for a later plan.
    shrink:  granules that no step from now on uses; their pages are wanted back.
    prepare: batches whose missing pages start to come in.
    grow:    granules wanted, most wanted first; as many as there are pages for.
    oldest:  batches with smaller numbers are of no interest any more.
    agree:   something is under way: all ranks exchange their reports in this step, so that what
             the scheduler hears is what holds on all of them (`merged`).
    signals: the reports of this step carry signals.
    """

    step: int
    abort: tuple[int, ...] = ()
    commit: tuple[int, ...] = ()
    shrink: tuple[int, ...] = ()
    prepare: tuple[Batch, ...] = ()
    grow: tuple[int, ...] = ()
    oldest: int = 0
    agree: bool = False
    signals: bool = False
    version: int = MESSAGE_VERSION


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """Stage of one batch on a rank; `reason` says in words why it failed."""

    number: int
    stage: Stage
    reason: str = ""


@dataclass
class Signals:
    """Runtime signals of a rank since its last report (`kernels.contract.LayerStats`), float32.

    mass [L, E]; tokens [L, E]; features [L, E, 2, 3].
    """

    mass: NDArray[np.float32]
    tokens: NDArray[np.float32]
    features: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RankPages:
    """One rank's part of a report.

    free:      pages that KV or a reload could take now. The pool's reserve is not counted.
    returning: pages that nobody reads any more and that go back to the pool in the next steps,
               because only so many do in one.
    signals:   of its own rows, None when the plan did not ask, they are on their way, or another
               rank with the same rows sends them.
    """

    rank: int
    free: int
    returning: int = 0
    signals: Signals | None = None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """How a rank, or all of them (`merged`), stand after plan `step` was applied.

    batches:  stage of every batch from the plan's `oldest` on that it has seen.
    backed:   bit g is set when granule g is backed.
    pages:    of each rank that the report speaks of.
    counters: running totals by name, for metrics (`Counters`).
    """

    step: int
    batches: tuple[BatchStatus, ...] = ()
    backed: int = 0
    pages: tuple[RankPages, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)
    version: int = MESSAGE_VERSION


def check_version(message: StepPlan | WorkerReport) -> None:
    """ValueError with both numbers when the other process runs another release."""
    if message.version != MESSAGE_VERSION:
        raise ValueError(
            f"a {type(message).__name__} of version {message.version}, this process speaks "
            f"{MESSAGE_VERSION}: all processes must run the same pagedweight"
        )


def merged(reports: Sequence[WorkerReport]) -> WorkerReport:
    """What holds on all ranks: least stage, common granules, the pages of each.

    A batch that failed on one rank has failed. Counters are the largest of any rank.
    """
    backed = reports[0].backed
    for report in reports[1:]:
        backed &= report.backed
    return replace(
        reports[0],
        step=min(report.step for report in reports),
        batches=_least(reports),
        backed=backed,
        pages=tuple(pages for report in reports for pages in report.pages),
        counters=largest(report.counters for report in reports),
    )


def _least(reports: Sequence[WorkerReport]) -> tuple[BatchStatus, ...]:
    by_number: dict[int, list[BatchStatus]] = {}
    for report in reports:
        for status in report.batches:
            by_number.setdefault(status.number, []).append(status)
    return tuple(
        min(found, key=lambda status: status.stage)
        for _, found in sorted(by_number.items())
        if len(found) == len(reports)
    )


def largest(counters: Iterable[dict[str, int]]) -> dict[str, int]:
    """The largest value of each running total."""
    out: dict[str, int] = {}
    for counted in counters:
        for name, value in counted.items():
            out[name] = max(value, out.get(name, value))
    return out


def granules_of(backed: int) -> list[int]:
    """Granule numbers of a `WorkerReport.backed`."""
    return [g for g in range(backed.bit_length()) if backed >> g & 1]


def mask_of(granules: Iterable[int]) -> int:
    """The inverse of `granules_of`."""
    return sum(1 << g for g in set(granules))
