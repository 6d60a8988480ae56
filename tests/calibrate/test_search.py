"""The policy search on made-up text whose damage is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from pagedweight.calibrate.measurements import SEGMENTS, Measurements
from pagedweight.calibrate.search import run as run_module
from pagedweight.calibrate.search.folds import (
    Split,
    calibrated,
    check_trials,
    clusters,
    nearest,
    search_trials,
)
from pagedweight.calibrate.search.knobs import RANGES, Knobs, policy_of
from pagedweight.calibrate.search.objective import BUDGET_BITS, TOLERANCE, Objective
from pagedweight.calibrate.search.run import MARGIN, SearchResult, search_policy
from pagedweight.core.geometry import LayerShape
from pagedweight.core.policy import Policy
from pagedweight.core.policy_file import policy_from_json, policy_to_json
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.errors import UserError

LEVELS = (2, 3, 4, 5)
LAYERS, EXPERTS, SEQUENCES, LENGTH = 2, 6, 9, 128
SIZES = SizeTable.of(LayerShape(EXPERTS, 128, 64), LEVELS)
INDEX = BlockIndex(LAYERS, EXPERTS)


def made(follows: float, seed: int = 0) -> Measurements:
    """Text of two topics that use experts differently. A block's damage goes with the mass of its
    expert to the power of `follows`, times what the block has of its own."""
    rng = np.random.default_rng(seed)
    topics = rng.dirichlet(np.ones(EXPERTS), (2, LAYERS))
    topic = rng.integers(0, 2, SEQUENCES)
    topic[: SEQUENCES // 2] = 0
    share = topics[topic][:, None].repeat(SEGMENTS, 1) * rng.lognormal(
        0, 0.2, (SEQUENCES, SEGMENTS, LAYERS, EXPERTS)
    )
    mass = (LENGTH * share / share.sum(-1, keepdims=True)).astype(np.float32)
    own = rng.lognormal(0, 1.0, (LAYERS, EXPERTS, 2))
    norm = np.stack([mass, mass, np.ones_like(mass)], axis=-1)
    block = own * (np.maximum(mass, 1e-3) / LENGTH)[..., None] ** follows
    return Measurements(
        length=np.full((SEQUENCES, SEGMENTS), LENGTH),
        routed=mass,
        mass=mass,
        features=norm[:, :, :, :, None].repeat(2, 4).astype(np.float32),
        damage=block[..., None] * 4.0 ** -np.arange(len(LEVELS)),
    )


def searched(measured: Measurements, seed: int = 0) -> SearchResult:
    return search_policy(measured, LEVELS, SIZES, Policy(), seed)


@pytest.fixture(scope="module")
def followed() -> SearchResult:
    return searched(made(follows=1.0))


def test_the_search_leans_on_signals_that_tell(followed: SearchResult) -> None:
    """Damage goes with mass: adapting wins on held-out text, most of all where that is shifted."""
    assert followed.knobs.exponent > 0 or followed.knobs.alpha > 0
    shifted = [r for r in followed.check if r["trial"] == "shifted" and r["policy"] == "found"]
    assert np.mean([row["damage_over_static"] for row in shifted]) < 0.9
    inside = [r for r in followed.check if r["trial"] == "in-domain" and r["policy"] == "found"]
    assert np.mean([row["damage_over_static"] for row in inside]) < 1.02


def test_the_search_leaves_alone_what_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage has nothing to do with mass: adapting would only lose, and mu is off."""
    narrow(monkeypatch, exponent=(0.0, 1.0), alpha=(0.0, 1.0))
    found = searched(made(follows=0.0))
    assert found.knobs.exponent == 0.0


def narrow(monkeypatch: pytest.MonkeyPatch, **ranges: tuple[float, ...]) -> None:
    """Search these knobs only."""
    monkeypatch.setattr(run_module, "RANGES", ranges)


def test_a_search_repeats_and_the_seed_decides_its_split(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(monkeypatch, exponent=(0.0, 1.0), floor=(3, 2))
    first, again = searched(made(follows=1.0)), searched(made(follows=1.0))
    assert again.policy == first.policy
    assert again.tried == first.tried
    assert again.check == first.check
    assert Split.of(9, 0) != Split.of(9, 1)


def test_the_result_is_a_policy_file(followed: SearchResult) -> None:
    assert policy_from_json(policy_to_json(followed.policy)) == followed.policy


def test_the_winner_has_the_best_score_up_to_the_margin(followed: SearchResult) -> None:
    scores = {tuple(r[name] for name in RANGES): r["score"] for r in followed.tried}
    won = scores[tuple(getattr(followed.knobs, name) for name in RANGES)]
    start = scores[tuple(getattr(Knobs(), name) for name in RANGES)]
    assert won <= start
    for name, values in RANGES.items():  # no single turn from the winner is better
        for value in values:
            turned = replace(followed.knobs, **{name: value})
            key = tuple(getattr(turned, of) for of in RANGES)
            assert scores.get(key, won) >= won - MARGIN - 1e-12


@pytest.mark.parametrize("name", RANGES)
def test_every_knob_makes_another_policy(name: str) -> None:
    made_of = {policy_of(replace(Knobs(), **{name: value}), Policy()) for value in RANGES[name]}
    assert len(made_of) == len(RANGES[name])


@pytest.mark.parametrize("calm", RANGES["calm"])
def test_buckets_are_the_ratio_to_the_power(calm: float) -> None:
    policy = policy_of(Knobs(calm=calm, exponent=1.5), Policy())
    for bucket, hotter in pairwise(policy.buckets):
        if bucket.at_least < 1.0 <= hotter.at_least:
            assert bucket.multiplier == 1.0  # the calm one
            assert bucket.at_least == pytest.approx(2**-calm)
        elif bucket.at_least:
            middle = (bucket.at_least * hotter.at_least) ** 0.5
            assert bucket.multiplier == pytest.approx(middle**1.5)
    off = policy_of(Knobs(calm=calm, exponent=0.0), Policy())
    assert {bucket.multiplier for bucket in off.buckets} == {1.0}


def test_what_is_held_out_is_not_calibrated_on() -> None:
    """Sequences of the check are in no trial of the search; a trial's texts are not in its
    calibration."""
    measured, split = made(follows=1.0), Split.of(SEQUENCES, 0)
    assert not set(split.search) & set(split.check)
    spoiled = Measurements(**{k: v.copy() for k, v in vars(measured).items()})
    for array in vars(spoiled).values():
        array[list(split.check)] = 7
    plain, other = (search_trials(m, LEVELS, split, 0) for m in (measured, spoiled))
    for one, same in zip(plain, other, strict=True):
        assert (one.calibration.sensitivity == same.calibration.sensitivity).all()
        for case, twin in zip(one.cases, same.cases, strict=True):
            assert (case.damage == twin.damage).all()
    trial = check_trials(measured, LEVELS, split, 0)[0]
    pieces = [(s, g) for s in split.search for g in range(SEGMENTS)]
    alone = calibrated(measured.only(pieces), LEVELS)
    np.testing.assert_allclose(trial.calibration.sensitivity, alone.sensitivity)


def test_signals_come_before_the_damage_that_they_are_held_against() -> None:
    measured, split = made(follows=1.0), Split.of(SEQUENCES, 0)
    late = Measurements(**{k: v.copy() for k, v in vars(measured).items()})
    late.damage[:, : SEGMENTS // 2] = 0  # nobody may look at damage before the planning
    late.mass[:, SEGMENTS // 2 :] *= 3  # nor at signals after it
    first, second = (check_trials(m, LEVELS, split, 0)[0] for m in (measured, late))
    for case, twin in zip(first.cases, second.cases, strict=True):
        np.testing.assert_array_equal(case.signals.mass, twin.signals.mass)
        np.testing.assert_array_equal(case.damage, twin.damage)


def test_shifted_trials_are_farther_than_in_domain_ones() -> None:
    trials = search_trials(made(follows=1.0), LEVELS, Split.of(SEQUENCES, 0), 0)
    far = [trial.distance for trial in trials if trial.shifted]
    near = [trial.distance for trial in trials if not trial.shifted]
    assert far
    assert max(far) > max(near)


def test_clusters_find_what_was_mixed() -> None:
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal(at, 0.1, (20, 3)) for at in (0.0, 5.0)])
    of = nearest(points, clusters(points, 2, seed=1))
    assert len(set(of[:20].tolist())) == len(set(of[20:].tolist())) == 1
    assert of[0] != of[-1]


def test_damage_is_that_of_the_levels_of_the_plan() -> None:
    """Blind to signals, the planner is about as good as static (two dozen blocks leave greedy steps
    little to choose from); the oracle is never worse. A fine is due beyond the tolerance."""
    trials = search_trials(made(follows=1.0), LEVELS, Split.of(SEQUENCES, 0), 0)
    objective = Objective(trials, SIZES, INDEX, Policy())
    assert objective.budget_bits == tuple(b for b in BUDGET_BITS if b <= LEVELS[-1])
    assert (objective.yardstick.oracle <= objective.yardstick.static * (1 + 1e-9)).all()
    blind = policy_of(Knobs(alpha=0, exponent=0, floor=2), Policy())
    found = objective.damage(blind)
    assert 0.97 < float((found / objective.yardstick.static).mean()) < 1.06
    shifted = np.array([trial.shifted for trial in trials])[:, None]
    even = objective.score(objective.yardstick.static)
    harmed = objective.yardstick.static * np.where(shifted, 1.0, np.exp(2 * TOLERANCE))
    assert even == 0.0
    assert objective.score(harmed) == pytest.approx(10 * TOLERANCE)
    assert objective.score(objective.yardstick.oracle) < 0


def test_too_little_text_is_refused() -> None:
    with pytest.raises(UserError, match="at least 4 calibration sequences, not 3"):
        Split.of(3, 0)
