"""Plan files: round trip, and a message for each way in which one does not fit."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from pagedweight.checkpoint.plan import load_plan, save_plan, uniform_plan
from pagedweight.core.geometry import LayerShape
from pagedweight.errors import UserError


@dataclass(frozen=True)
class Facts:
    """The facts of a checkpoint that a plan has to fit."""

    shape: LayerShape
    bits: tuple[int, ...]
    moe_layers: tuple[int, ...]


FACTS = Facts(LayerShape(3, 64, 48), bits=(2, 3, 4), moe_layers=(1, 3))


def test_round_trip(tmp_path):
    plan = np.random.default_rng(0).integers(2, 5, (2, 3, 2)).astype(np.int8)
    save_plan(tmp_path / "plan.json", plan)
    loaded = load_plan(tmp_path / "plan.json", FACTS)
    assert loaded.dtype == np.int8
    assert np.array_equal(loaded, plan)


def test_uniform():
    plan = uniform_plan(FACTS, 3)
    assert plan.shape == (2, 3, 2)
    assert plan.dtype == np.int8
    assert set(plan.ravel()) == {3}
    with pytest.raises(UserError, match="5 bits are not stored; the checkpoint has 2 to 4"):
        uniform_plan(FACTS, 5)


def rows(layers: int = 2, experts: int = 3, bits: object = 3) -> list[list[object]]:
    return [[bits] * experts for _ in range(layers)]


GOOD = {"format": "pagedweight-plan", "version": 1, "bits": {"gate_up": rows(), "down": rows()}}


@pytest.mark.parametrize(
    "change, says",
    [
        ({"format": "other"}, "is not a plan"),
        ({"version": 2}, "version 2; this release reads version 1"),
        ({"bits": {"gate_up": rows()}}, "exactly gate_up and down"),
        ({"bits": {"gate_up": rows(3), "down": rows()}}, "gate_up has 3 layers.*2 MoE layers"),
        ({"bits": {"gate_up": rows(), "down": 4}}, "down has int layers"),
        ({"bits": {"gate_up": rows(experts=4), "down": rows()}}, "0 has 4 experts.*checkpoint 3"),
        ({"bits": {"gate_up": rows(), "down": rows(bits=7)}}, r"\[2, 3, 4\].*layer 0 expert 0: 7"),
        ({"bits": {"gate_up": rows(bits=3.0), "down": rows()}}, "expert 0: 3.0"),
        ({"bits": {"gate_up": rows(bits=True), "down": rows()}}, "expert 0: True"),
    ],
)
def test_plans_that_do_not_fit(tmp_path, change, says):
    (tmp_path / "plan.json").write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(UserError, match=says):
        load_plan(tmp_path / "plan.json", FACTS)


@pytest.mark.parametrize("text", [None, "", "[1]", "{"])
def test_files_that_are_no_plan_at_all(tmp_path, text):
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    with pytest.raises(UserError, match=r"plan\.json"):
        load_plan(tmp_path / "plan.json", FACTS)
