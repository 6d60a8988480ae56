"""Where a command writes: refused before the work, whole afterwards, nothing left beside."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pagedweight.checkpoint import result_file
from pagedweight.checkpoint.result_file import (
    check_picture,
    check_target,
    write_picture,
    write_result,
)
from pagedweight.errors import UserError


def test_what_can_be_written_is_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    check_target(path)
    assert list(tmp_path.iterdir()) == []
    write_result(path, b"1")
    write_result(path, b"23")
    write_picture(tmp_path / "b.SVG", Figure((1, 1)))
    assert path.read_bytes() == b"23"
    assert b"<svg" in (tmp_path / "b.SVG").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.SVG"]


@pytest.mark.parametrize(
    "name, message",
    [
        ("", "it is a folder"),
        ("folder", "it is a folder"),
        ("none/a.json", "there is no folder"),
        ("file/a.json", "there is no folder"),
        ("n" * 300, "File name too long"),
    ],
)
def test_what_cannot_be_written_is_said(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match=message):
        write_result(tmp_path / name, b"1")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


def test_a_folder_that_takes_no_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write /proc"):
        check_target(Path("/proc/a.json"))


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result_file, "write_atomic", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_result(path, b"new")
    assert path.read_text() == "old"


def test_pictures_have_a_format(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pictures are written as"):
        check_picture(tmp_path / "a.bmp")
