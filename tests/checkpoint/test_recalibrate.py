"""Replacing calibration in a finished checkpoint: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagedweight.checkpoint import recalibrate as module
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.recalibrate import replace_calibration, settle
from pagedweight.checkpoint.tensorfile import sha256_file
from pagedweight.errors import CheckpointError, UserError
from quantized import METADATA, make_quantized


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return make_quantized(tmp_path / "out")[0]


def arrays_of(checkpoint: Checkpoint, factor: float = 2.0) -> dict[str, np.ndarray]:
    found = checkpoint.calibration()
    return {
        "tokens": found.tokens,
        "mass": found.mass,
        **{f"second_moment.{kind}": array for kind, array in found.second_moment.items()},
        "error": found.error,
        "sensitivity": (found.error * factor).astype(np.float32),
    }


def state(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): sha256_file(p) for p in folder.rglob("*") if p.is_file()}


def test_only_calibration_and_manifest_change(checkpoint: Checkpoint) -> None:
    before = state(checkpoint.path)
    after = replace_calibration(checkpoint, arrays_of(checkpoint), {**METADATA, "labels": "model"})
    changed = {name for name, digest in state(checkpoint.path).items() if digest != before[name]}
    assert changed == {"pagedweight.json", "experts/calibration.safetensors"}
    assert after.verify() == []
    found = after.calibration()
    np.testing.assert_array_equal(found.sensitivity, found.error * np.float32(2))
    assert found.metadata["labels"] == "model"


def test_again_and_again(checkpoint: Checkpoint) -> None:
    for factor in (2.0, 3.0):
        checkpoint = replace_calibration(checkpoint, arrays_of(checkpoint, factor), METADATA)
    assert checkpoint.verify() == []
    np.testing.assert_array_equal(
        checkpoint.calibration().sensitivity, checkpoint.calibration().error * np.float32(3)
    )


@pytest.mark.parametrize(
    "fault, message",
    (
        ({"error": None}, "error is missing"),
        ({"sensitivity": np.zeros((1, 1, 2, 1), np.float32)}, "sensitivity is F32"),
        ({"sensitivity": "nan"}, "sensitivity.* is nan"),
    ),
)
def test_arrays_that_break_the_schema_change_nothing(
    checkpoint: Checkpoint, fault: dict[str, object], message: str
) -> None:
    arrays = arrays_of(checkpoint)
    for name, value in fault.items():
        if value is None:
            del arrays[name]
        elif isinstance(value, str):
            arrays[name][0, 0, 0, 0] = np.nan
        else:
            arrays[name] = np.asarray(value)
    before = state(checkpoint.path)
    with pytest.raises(CheckpointError, match=message):
        replace_calibration(checkpoint, arrays, METADATA)
    assert state(checkpoint.path) == before


def test_a_full_disk_changes_nothing(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest cannot be written once the calibration is: neither is put in place."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = state(checkpoint.path)
    monkeypatch.setattr(module, "write_atomic", full)
    with pytest.raises(UserError, match="No space left"):
        replace_calibration(checkpoint, arrays_of(checkpoint), METADATA)
    assert state(checkpoint.path) == before
    assert Checkpoint.open(checkpoint.path).verify() == []


@pytest.mark.parametrize("renames", (0, 1))
def test_killed_at_any_point_it_is_old_or_new(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Killed before the first rename nothing has changed; between the two, `settle` ends it."""
    before, done = state(checkpoint.path), []
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if self.suffix == ".new":
            if len(done) == renames:
                raise KeyboardInterrupt
            done.append(target)
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        patch.setattr(Path, "unlink", lambda *_, **__: None)  # a killed process cleans nothing up
        with pytest.raises(KeyboardInterrupt):
            replace_calibration(checkpoint, arrays_of(checkpoint), METADATA)
    if renames:
        with pytest.raises(CheckpointError, match="run `pagedweight calibrate` again"):
            Checkpoint.open(checkpoint.path)
    settle(checkpoint.path)
    assert not list(checkpoint.path.rglob("*.new"))
    assert Checkpoint.open(checkpoint.path).verify() == []
    assert (state(checkpoint.path) == before) == (renames == 0)


def test_settle_of_what_no_calibration_left(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A waiting manifest that is none is named, a checkpoint without calibration is left to `open`,
    and what is no folder too."""
    waiting = checkpoint.path / f"{module.MANIFEST}.new"
    waiting.write_text("{}")
    with pytest.raises(UserError, match=r"\.new is not a manifest .*: remove it"):
        settle(checkpoint.path)
    (checkpoint.path / module.CALIBRATION).unlink()
    settle(checkpoint.path)
    assert not waiting.exists()
    (tmp_path / "file").write_text("kept")
    settle(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
