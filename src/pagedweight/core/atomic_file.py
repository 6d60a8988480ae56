"""Files that are there whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def write_atomic(path: Path, pieces: Iterable[bytes | bytearray | memoryview]) -> tuple[int, str]:
    """Write under a temporary name in the same folder, sync, rename; (bytes, sha256)."""
    temporary = path.with_name(f".{path.name}.tmp")
    digest, written = hashlib.sha256(), 0
    try:
        with temporary.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                written += len(piece) if not isinstance(piece, memoryview) else piece.nbytes
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return written, digest.hexdigest()
