"""Files that a command writes where the user says: refused before the work, else written whole."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

from pagedweight.core.atomic_file import write_atomic
from pagedweight.errors import UserError

PICTURES = (".png", ".svg", ".pdf")


def check_target(path: Path) -> None:
    """Raise UserError when no file can be written at `path`; nothing is left there."""
    parent = path.absolute().parent
    try:
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder; name a file in it")
        if not parent.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {parent}")
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def write_result(path: Path, content: bytes) -> None:
    """Write under a temporary name, then rename. UserError when that fails; `path` is as before."""
    check_target(path)
    try:
        write_atomic(path, [content])
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def check_picture(path: Path) -> None:
    """UserError when no picture can be written at `path`."""
    if path.suffix.lower() not in PICTURES:
        raise UserError(f"cannot draw {path}: pictures are written as {', '.join(PICTURES)}")
    check_target(path)


def write_picture(path: Path, figure: Any) -> None:
    """A matplotlib figure in the format that the name ends in, whole or not at all. UserError."""
    check_picture(path)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:].lower(), dpi=130)
    write_result(path, drawn.getvalue())
