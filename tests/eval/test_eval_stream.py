"""Windows through policies: scores by definition, strictly causal, signals as the runtime's."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedweight.core.policies import Assignment, make_policy
from pagedweight.core.policy import FloorStage, Policy
from pagedweight.eval.reference import load_plain, load_quantized
from pagedweight.eval.statistics import window_kl, window_nll
from pagedweight.eval.stream import Lane, StreamOptions, score_stream
from pagedweight.eval.study import Study, StudyOptions
from quantized import make_quantized

CPU = torch.device("cpu")
EXPERT = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
FREE = Policy(stages=(FloorStage("floor", (2,) * 13),), prior_tokens=1.0)


class Spy:
    """Gives the bits of a policy and keeps the signals it was asked with."""

    def __init__(self, policy):
        self.policy, self.asked = policy, []

    def assign(self, signals):
        self.asked.append(None if signals is None else signals.mass.copy())
        return self.policy.assign(signals)


def give_its_weights(source, layers):
    """Make the source what the random checkpoint says at 6 bits: a study asks for that."""
    for file in sorted(source.glob("*.safetensors")):
        tensors = load_file(file)
        for name in tensors:
            if found := EXPERT.search(name):
                position, expert, part = int(found[1]), int(found[2]), found[3]
                kind = "down" if part == "down" else "gate_up"
                weight = layers[position].weights(expert, kind, 6, torch.bfloat16)
                if kind == "gate_up":
                    weight = weight.chunk(2)[part == "up"]
                assert weight.shape == tensors[name].shape
                tensors[name] = weight.to(tensors[name].dtype).contiguous()
        save_file(tensors, file, {"format": "pt"})


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream") / "out"
    _, layers = make_quantized(path)
    give_its_weights(path.with_name("out-source"), layers)
    found = Study(StudyOptions(path, path.with_name("out-source"), ()))
    found.policy = FREE
    return found


def score(study, tokens, names=("paged",), bits="3.5b", replan=None, seats=8, seconds=float("inf")):
    lanes = [study.lane(name, study.budget(bits), "") for name in names]
    spies = [Lane(lane.name, Spy(lane.policy), lane.calibration, 1.0) for lane in lanes]
    options = StreamOptions(study.checkpoint.top_k, replan, seats, seconds)
    scores = score_stream(study.fleet, spies, tokens, study.sizes, options, lambda *_: None)
    return scores, spies


def windows(seed, count=4, length=24):
    return torch.randint(0, 96, (count, length), generator=torch.Generator().manual_seed(seed))


def test_scores_are_those_of_the_models_one_by_one(study):
    tokens = windows(1, 2)
    scores, _ = score(study, tokens, ("static", "uniform"))
    source = load_plain(study.options.model, torch.float32, CPU)
    for lane, name in enumerate(("static", "uniform")):
        bits = study.lane(name, study.budget("3.5b"), "").policy.assign(None).bits
        model = load_quantized(study.checkpoint, bits, torch.float32, CPU)
        for at, window in enumerate(tokens):
            base, ours = source.logits(window), model.logits(window)
            assert scores.base_nll[at] == pytest.approx(window_nll(base, window), abs=1e-4)
            assert scores.nll[lane, at] == pytest.approx(window_nll(ours, window), abs=1e-4)
            assert scores.kl[lane, at] == pytest.approx(window_kl(base, ours), abs=1e-4)


@pytest.mark.parametrize("replan", [None, 8])
@pytest.mark.parametrize("changed", [0, 1, 3])
def test_bits_never_depend_on_the_window_they_are_scored_on(study, replan, changed):
    """Other tokens from window `changed` on: all bits up to and including it are the same."""
    tokens, other = windows(1), windows(1)
    other[changed:] = windows(2)[changed:]
    (one, ours), (two, theirs) = (score(study, text, replan=replan) for text in (tokens, other))
    pieces = 1 if replan is None else 3
    before = changed * pieces + 1  # the window's first piece is chosen before it is seen
    for a, b in zip(ours[0].policy.asked[:before], theirs[0].policy.asked[:before], strict=True):
        assert (a is None and b is None) or (a == b).all()
    for a, b in zip(one.plans[0][:changed], two.plans[0][:changed], strict=True):
        assert (a.bits == b.bits).all()
    if replan is None:
        assert (one.plans[0][changed].bits == two.plans[0][changed].bits).all()
    later = ours[0].policy.asked[before:], theirs[0].policy.asked[before:]
    assert all((a != b).any() for a, b in zip(*later, strict=True))  # and then they do


def test_the_first_window_knows_calibration_alone_and_later_ones_more(study):
    _, spies = score(study, windows(1))
    asked = spies[0].policy.asked
    assert asked[0] is None
    assert len(asked) == 4
    assert (asked[1] != asked[2]).any()


def test_signals_are_decayed_sums_as_the_runtime_makes_them(study):
    tokens = windows(1, 3)
    _, spies = score(study, tokens, ("static",))
    plan = study.lane("static", study.budget("3.5b"), "").policy.assign(None)
    each = [study.fleet.run(window, [plan]).signals[0] for window in tokens[:2]]
    mass, count = each[0].mass * 0.98 + each[1].mass, 24 * 0.98 + 24
    usual = study.calibration.mass / study.calibration.mass.sum(1, keepdims=True)
    whole = mass.sum(1, keepdims=True)
    mixed = mass + usual * whole / count  # one token's worth of calibration
    wanted = mixed / mixed.sum(1, keepdims=True)
    assert np.allclose(spies[0].policy.asked[2], wanted, rtol=1e-5)


def test_replanning_within_a_window_changes_its_bits_and_its_score(study):
    tokens = windows(5, 2)
    once, _ = score(study, tokens)
    often, spies = score(study, tokens, replan=8)
    assert len(spies[0].policy.asked) == 6
    assert spies[0].policy.asked[1] is not None  # the second piece knows the first
    assert (once.kl[0] != often.kl[0]).any()
    still, _ = score(study, tokens, ("static",), replan=8)
    whole, _ = score(study, tokens, ("static",))
    assert np.allclose(still.kl, whole.kl, atol=1e-5)


def test_groups_of_seats_do_not_show(study):
    tokens, names = windows(3, 2), ("uniform", "static", "paged")
    together, _ = score(study, tokens, names)
    apart, _ = score(study, tokens, names, seats=1)
    assert np.allclose(together.kl, apart.kl, atol=1e-6)
    assert np.allclose(together.base_nll, apart.base_nll, atol=1e-6)


def test_what_is_held_is_what_the_assignments_cost(study):
    scores, _ = score(study, windows(3, 2), ("uniform", "dynamic-layer"))
    budget = study.budget("3.5b")
    uniform, dynamic = scores.held
    assert 0 <= budget - uniform.resident.max() < study.sizes.delta(0, 4, 3)
    assert dynamic.read.mean() == pytest.approx(budget, abs=1)
    assert dynamic.resident.mean() > budget


def test_when_time_is_up_the_windows_so_far_are_the_scores(study):
    """One window always; a score does not depend on how many follow."""
    tokens = windows(5, 3)
    whole, _ = score(study, tokens)
    cut, _ = score(study, tokens, seconds=0.0)
    assert len(cut.base_nll) == len(cut.held[0].bits) == 1
    assert cut.kl.shape == cut.nll.shape == (1, 1)
    assert cut.kl[0, 0] == whole.kl[0, 0]


def test_make_policy_is_what_lanes_run(study):
    bits = study.lane("random", study.budget("3b"), "").policy.assign(None).bits
    again = make_policy("random", study.context(), study.budget("3b"), 0).assign(None)
    assert isinstance(again, Assignment)
    assert (bits == again.bits).all()
