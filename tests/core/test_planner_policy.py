"""Policy and calibration: defaults, JSON, and messages that list every offender."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from planner_world import arrays, with_heads

from pagedweight.core.calibration import Calibration
from pagedweight.core.policy import Bucket, FloorStage, Policy
from pagedweight.core.policy_file import (
    load_policy,
    policy_from_json,
    policy_to_json,
    save_policy,
)
from pagedweight.errors import CheckpointError, UserError

LEVELS = (2, 3, 4, 5, 6)


def test_policy_survives_json(tmp_path: Path) -> None:
    policy = replace(
        Policy(),
        alpha=0.5,
        stages=(FloorStage("only", (3,) * 10 + (4, 4, 5), depth_cap=2, least_bits=4),),
        use_routing=False,
    )
    save_policy(policy, tmp_path / "policy.json")
    assert load_policy(tmp_path / "policy.json") == policy
    assert policy_from_json(policy_to_json(Policy())) == Policy()
    assert [p.name for p in tmp_path.iterdir()] == ["policy.json"]


def test_fields_left_out_have_their_defaults() -> None:
    text = json.dumps({"format": "pagedweight-policy", "format_version": 1, "alpha": 2})
    assert policy_from_json(text) == replace(Policy(), alpha=2)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"aplha": 1.0}, "unknown: aplha"),
        ({"alpha": "1"}, 'alpha must be float, not "1"'),
        ({"dwell_steps": 1.5}, "dwell_steps must be int"),
        ({"use_routing": 1}, "use_routing must be bool"),
        ({"dwell_steps": True}, "dwell_steps must be int"),
        ({"buckets": {}}, "buckets must be a list"),
        ({"buckets": [3]}, "a Bucket is an object"),
        ({"buckets": [{"at_least": 0.0}]}, "a Bucket needs multiplier"),
        ({"stages": [{"name": "x", "floors": [3.5]}]}, "floors must be whole numbers"),
        ({"stages": [{"name": "x", "floors": [3]}]}, "stage x has 1 floors for 13 buckets"),
        ({"format_version": 2}, "format_version 2, this program reads 1"),
        ({"format": "else"}, "not a policy"),
    ],
)
def test_json_faults_are_named(change: dict[str, object], told: str) -> None:
    data = {"format": "pagedweight-policy", "format_version": 1} | change
    with pytest.raises(UserError) as caught:
        policy_from_json(json.dumps(data), "policy p.json")
    assert told in str(caught.value)
    assert str(caught.value).startswith("policy p.json")


def test_unreadable_policy_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read policy"):
        load_policy(tmp_path / "absent.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        load_policy(tmp_path / "bad.json")


BUCKET = (Bucket(0.0, 1.0), Bucket(2.0, 2.0))
STAGE = (FloorStage("floor", (3, 3)),)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"buckets": (Bucket(0.5, 1.0), Bucket(2.0, 2.0))}, "must start at a mass ratio of 0"),
        ({"buckets": (Bucket(0.0, 1.0), Bucket(0.0, 2.0))}, "rising mass ratios"),
        ({"buckets": (Bucket(0.0, 2.0), Bucket(2.0, 1.0))}, "multipliers at least as large"),
        ({"buckets": (Bucket(0.0, 0.0), Bucket(2.0, 1.0))}, "positive"),
        ({"stages": (FloorStage("e", (2, 2), emergency=True),)}, "not an emergency"),
        ({"stages": (*STAGE, *STAGE)}, "names must differ"),
        ({"stages": (FloorStage("e", (2, 2), emergency=True), *STAGE)}, "must come last"),
        ({"stages": (FloorStage("floor", (4, 3)),)}, "floors at least as high"),
        ({"stages": (FloorStage("floor", (1, 9)),)}, "must be 2 to 8 bits"),
        ({"stages": (FloorStage("floor", (3, 3), depth_cap=0),)}, "depth cap"),
        ({"alpha": -1.0}, "alpha"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"offload_blocks": -1}, "offload_blocks"),
        ({"reload_pages_per_step": 0}, "reload_pages_per_step"),
        ({"reload_blocks": 16, "offload_blocks": 16}, "must be above offload_blocks"),
    ],
)
def test_unsound_policies_are_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(UserError) as caught:
        Policy(**({"buckets": BUCKET, "stages": STAGE} | change))  # type: ignore[arg-type]
    assert told in str(caught.value)


def test_all_faults_are_listed_at_once() -> None:
    with pytest.raises(UserError) as caught:
        Policy(alpha=-1.0, offload_blocks=-1, stages=())
    for told in ("alpha", "offload_blocks", "not an emergency"):
        assert told in str(caught.value)


def test_documentation_names_every_field() -> None:
    assert Policy.__doc__ is not None
    assert [f.name for f in fields(Policy) if f.name not in Policy.__doc__] == []


# -- calibration ----------------------------------------------------------------------------------


def test_tokens_times_error_stand_in_for_sensitivity() -> None:
    data = arrays(0)
    error = data.pop("sensitivity")
    known = Calibration.from_arrays(data | {"error": error}, LEVELS)
    assert not known.measured
    np.testing.assert_allclose(known.sensitivity, error * data["tokens"][:, :, None, None])
    both = Calibration.from_arrays(data | {"error": error, "sensitivity": error}, LEVELS)
    assert both.measured
    np.testing.assert_array_equal(both.sensitivity, error)


@pytest.mark.parametrize("measured", [True, False])
def test_unseen_experts_get_the_least_of_the_seen(measured: bool) -> None:
    data = arrays(0)
    data["tokens"][1, 2] = 0
    data["mass"] = data["tokens"] / data["tokens"].sum(1, keepdims=True)
    if measured:
        data["sensitivity"][1, 2] = 0.0
    else:
        data["error"] = data.pop("sensitivity")
    known = Calibration.from_arrays(data, LEVELS)
    assert known.unseen == ((1, 2),)
    others = np.delete(known.sensitivity[1], 2, axis=0)
    np.testing.assert_array_equal(known.sensitivity[1, 2], others.min(axis=0))
    assert known.mass[1, 2] == 0.5 / data["tokens"][1].sum()
    assert (known.sensitivity > 0).all()


def test_without_a_calibration_text_all_experts_are_alike() -> None:
    data = arrays(0)
    error = data.pop("sensitivity")
    nothing = {"tokens": np.zeros((2, 4), np.int64), "mass": np.zeros((2, 4)), "error": error}
    known = Calibration.from_arrays(nothing, LEVELS)
    np.testing.assert_array_equal(known.sensitivity, error)
    np.testing.assert_allclose(known.mass, 0.25)
    assert len(known.unseen) == 8


def test_calibration_round_trip() -> None:
    data = with_heads(arrays(0))
    data["tokens"][0, 1] = 0
    known = Calibration.from_arrays(data, LEVELS)
    again = Calibration.from_arrays(known.to_arrays(), LEVELS)
    np.testing.assert_array_equal(again.sensitivity, known.sensitivity)
    np.testing.assert_array_equal(again.mass, known.mass)
    assert again.unseen == known.unseen
    assert known.heads is not None
    assert again.heads is not None
    np.testing.assert_array_equal(again.heads.center, known.heads.center)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"tokens": None}, "tokens is missing"),
        ({"sensitivity": None}, "sensitivity and error are both missing"),
        ({"mass": np.ones((2, 5))}, "mass is [2, 5], not [2, 4]"),
        ({"sensitivity": np.ones((2, 4, 2, 4))}, "sensitivity is [2, 4, 2, 4], not [2, 4, 2, 5]"),
        ({"mass": np.full((2, 4), np.nan)}, "mass is negative or not finite at [0, 0] (8 places)"),
        ({"residual.bias": None}, "residual.bias is missing"),
        ({"residual.clip": np.ones((2, 4))}, "residual.clip is [2, 4], not [2, 4, 2]"),
        ({"residual.clip": np.tile([1.0, -1.0], (2, 4, 1))}, "lower bound above"),
        ({"residual.weight": np.full((2, 4, 3), np.inf)}, "residual.weight has values that"),
    ],
)
def test_calibration_faults_are_named(change: dict[str, np.ndarray | None], told: str) -> None:
    data = with_heads(arrays(0)) | change
    with pytest.raises(CheckpointError) as caught:
        Calibration.from_arrays({k: v for k, v in data.items() if v is not None}, LEVELS)
    assert told in str(caught.value)
