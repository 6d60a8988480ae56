"""Tell whether a source is the one a run was started with, without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pagedweight.checkpoint.source import SourceCheckpoint

SAMPLES = 64
SAMPLE_BYTES = 4096


def fingerprint(source: SourceCheckpoint) -> str:
    """sha256 over config.json and, for each weight file, name, size, header and 64 samples.

    Two trainings of one architecture differ in every sample; a single changed weight can pass.
    """
    digest = hashlib.sha256((source.path / "config.json").read_bytes())
    for path in sorted({file.path for file in source.files.values()}):
        _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size} ".encode())
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        digest.update(file.read(length))
        for sample in range(SAMPLES):
            file.seek(8 + length + (size - 8 - length) * sample // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
