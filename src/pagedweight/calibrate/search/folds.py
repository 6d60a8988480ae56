"""Trials of a policy: calibrate on one part of the text, plan for another.

Calibration text is all of one kind, and a search that saw nothing else would find that adapting is
hardly worth it. So there are two kinds of trial: "in-domain", where whole sequences are held out,
and "shifted", where segments are clustered by routing mass and what is calibrated on one cluster
plans for a far one: text that uses the experts differently from all that the planner knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedweight.calibrate.heads import fit_heads
from pagedweight.calibrate.measurements import SEGMENTS, FloatArray, Measurements
from pagedweight.core.calibration import Calibration
from pagedweight.core.observation import RequestSignals
from pagedweight.errors import UserError

Pieces = Sequence[tuple[int, int]]
"""(sequence, segment) pairs."""
PARTS = 4
"""In-domain trials, and the most shifted ones."""
CLUSTER = 12
"""Segments of a cluster on average; small clusters are the far ones."""
LEAST = 4
"""Segments that a text must have. The first half is what the planner has seen when it plans, the
damage is that of the second."""
ROUNDS = 50
DRAWS = 3
"""Clusterings, each from other starting points: far clusters are small, and one draw of them is
chance."""


@dataclass(frozen=True, eq=False)
class Case:
    """signals of what came before; damage float64 [L, E, 2, levels] of what came after."""

    signals: RequestSignals
    damage: FloatArray


@dataclass(frozen=True, eq=False)
class Trial:
    """A calibration, and texts that it has not seen. distance: how far the texts' routing mass is
    from the calibration's, mean |log2 ratio| weighed by mass."""

    name: str
    calibration: Calibration
    cases: tuple[Case, ...]
    distance: float

    @property
    def shifted(self) -> bool:
        return self.name.startswith("shifted")


@dataclass(frozen=True)
class Split:
    """Sequences of the search and sequences that it never sees, for the check afterwards."""

    search: tuple[int, ...]
    check: tuple[int, ...]

    @staticmethod
    def of(sequences: int, seed: int) -> Split:
        """A third is held out. Raises UserError when there are fewer than four sequences."""
        if sequences < 4:
            raise UserError(
                f"a policy search needs at least 4 calibration sequences, not {sequences}: some "
                f"are searched on and others held out"
            )
        order = np.random.default_rng(seed).permutation(sequences).tolist()
        count = -(-sequences // 3)
        return Split(tuple(sorted(order[count:])), tuple(sorted(order[:count])))


def search_trials(
    measured: Measurements, levels: Sequence[int], split: Split, seed: int
) -> list[Trial]:
    """Within the search's sequences: PARTS in-domain trials, and PARTS shifted ones of each
    clustering; fewer where there is too little text."""
    out = []
    for part in range(min(PARTS, len(split.search))):
        test = split.search[part::PARTS]
        train = [number for number in split.search if number not in test]
        out.append(_trial(f"in-domain {part}", measured, levels, _all(train), _all(test)))
    for again in range(DRAWS):
        out += _shifted(measured, levels, split.search, split.search, seed + again)
    return out


def check_trials(
    measured: Measurements, levels: Sequence[int], split: Split, seed: int
) -> list[Trial]:
    """Calibrated on the search's sequences, tested on the others."""
    whole = _trial("in-domain", measured, levels, _all(split.search), _all(split.check))
    return [whole, *_shifted(measured, levels, split.search, split.check, seed)]


def _shifted(
    measured: Measurements,
    levels: Sequence[int],
    train: Sequence[int],
    test: Sequence[int],
    seed: int,
) -> list[Trial]:
    """Trials calibrated on one cluster and tested on another: of each tested cluster the farthest
    to calibrate on, and of those the PARTS farthest."""
    points = _points(measured)
    new, seen = _all(test), _all(train)
    centers = clusters(points[_at(seen)], max(2, len(seen) // CLUSTER), seed)
    of_new, of_seen = (nearest(points[_at(pieces)], centers) for pieces in (new, seen))

    def members(pieces: Pieces, of: NDArray[np.int64], number: int) -> Pieces:
        return [at for at, one in zip(pieces, of, strict=True) if one == number]

    out = []
    for number in range(len(centers)):
        inside = members(new, of_new, number)
        if len(inside) < LEAST:
            continue
        others = [members(seen, of_seen, one) for one in range(len(centers)) if one != number]
        trials = [
            _trial(f"shifted {number}", measured, levels, other, inside)
            for other in others
            if len(other) >= 2 * LEAST
        ]
        out += sorted(trials, key=lambda trial: -trial.distance)[:1]
    return sorted(out, key=lambda trial: -trial.distance)[:PARTS]


def _at(pieces: Pieces) -> tuple[NDArray[np.int64], ...]:
    return tuple(np.array(pieces).T)


def _all(sequences: Sequence[int]) -> Pieces:
    return [(number, segment) for number in sequences for segment in range(SEGMENTS)]


def _trial(
    name: str, measured: Measurements, levels: Sequence[int], train: Pieces, test: Pieces
) -> Trial:
    calibration = calibrated(measured.only(train), levels)
    cases = tuple(_cases(measured, test))
    mass = np.sum([case.signals.mass for case in cases], axis=0, dtype=np.float64)
    return Trial(name, calibration, cases, _distance(mass, calibration.mass))


def _cases(measured: Measurements, pieces: Pieces) -> list[Case]:
    """Pieces in the order of the text, in runs of a sequence's length."""
    out = []
    for first in range(0, len(pieces), SEGMENTS):
        text = pieces[first : first + SEGMENTS]
        if len(text) >= LEAST:
            half = len(text) // 2
            damage = np.sum([measured.damage[at] for at in text[half:]], axis=0)
            out.append(Case(measured.joined(text[:half]), damage))
    return out


def calibrated(measured: Measurements, levels: Sequence[int]) -> Calibration:
    """What `pagedweight calibrate` would have written after seeing these measurements alone."""
    mass = measured.mass.sum((0, 1), dtype=np.float64)
    arrays = {
        "tokens": measured.routed.sum((0, 1)).round().astype(np.int64),
        "mass": mass / np.maximum(mass.sum(1, keepdims=True), 1e-30),
        "sensitivity": measured.damage.sum((0, 1)),
    }
    return Calibration.from_arrays(arrays | fit_heads(measured).heads.to_arrays(), levels)


def _points(measured: Measurements) -> FloatArray:
    """Square roots of each segment's mass, [S, G, L * E]: distances are then Hellinger's."""
    mass = measured.mass.astype(np.float64)
    share = mass / np.maximum(mass.sum(-1, keepdims=True), 1e-30)
    return np.sqrt(share).reshape(*mass.shape[:2], -1)


def clusters(points: FloatArray, count: int, seed: int) -> FloatArray:
    """Centers [clusters, D] of k-means on points [n, D]."""
    rng = np.random.default_rng(seed)
    centers = points[rng.choice(len(points), min(count, len(points)), replace=False)]
    found = nearest(points, centers)
    for _ in range(ROUNDS):
        for number in np.unique(found):
            centers[number] = points[found == number].mean(0)
        before, found = found, nearest(points, centers)
        if (before == found).all():
            break
    return centers


def nearest(points: FloatArray, centers: FloatArray) -> NDArray[np.int64]:
    """The center nearest to each point, int64 [n]."""
    return ((points[:, None] - centers) ** 2).sum(2).argmin(1)


def _distance(mass: FloatArray, usual: FloatArray) -> float:
    ours = mass / np.maximum(mass.sum(1, keepdims=True), 1e-30)
    theirs = usual / usual.sum(1, keepdims=True)
    ratio = np.log2(np.maximum(ours, 1e-6) / np.maximum(theirs, 1e-6))
    return float((np.abs(ratio) * theirs).sum(1).mean())
