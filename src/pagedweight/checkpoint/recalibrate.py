"""Replace what was measured in a finished checkpoint; codes, tables and everything else stay.

Two files change: experts/calibration.safetensors and the manifest, which has its size and checksum.
Both are written in full beside their places before either is renamed; a process killed between
the two renames leaves a manifest that `settle` puts in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedweight.checkpoint import calibration as cal
from pagedweight.checkpoint.manifest import CALIBRATION, MANIFEST, NEXT_MANIFEST, FileRecord
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.shards import read_json
from pagedweight.checkpoint.tensorfile import sha256_file, write_tensors
from pagedweight.core.atomic_file import write_atomic
from pagedweight.errors import UserError


def replace_calibration(
    checkpoint: Checkpoint,
    arrays: Mapping[str, npt.NDArray[Any]],
    metadata: Mapping[str, str],
) -> Checkpoint:
    """Write the arrays of docs/format.md by name; the checkpoint as it is then.

    Raises CheckpointError when the arrays break the schema, UserError when the folder cannot be
    written; the checkpoint is then as it was.
    """
    folder, manifest = checkpoint.path, checkpoint.manifest
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    entries = cal.entries_of(whole)
    cal.check_entries(
        "calibration", entries, manifest.shape, len(manifest.moe_layers), len(manifest.bits)
    )
    cal.check_metadata("calibration", metadata)
    cal.check_arrays("calibration", whole)
    ready, ready_manifest = folder / f"{CALIBRATION}.new", folder / NEXT_MANIFEST
    unseen = np.argwhere(whole["tokens"] == 0)
    try:
        data = (memoryview(array).cast("B") for array in whole.values())
        digest = write_tensors(ready, entries.values(), data, metadata)
        record = FileRecord(ready.stat().st_size, digest)
        changed = dataclasses.replace(
            manifest,
            files={**manifest.files, CALIBRATION: record},
            unseen_experts=tuple((manifest.moe_layers[pos], int(e)) for pos, e in unseen),
        )
        write_atomic(ready_manifest, [changed.encode()])
        ready.replace(folder / CALIBRATION)
        ready_manifest.replace(folder / MANIFEST)
    except OSError as error:
        raise UserError(f"cannot write the calibration of {folder}: {error}") from error
    finally:
        ready.unlink(missing_ok=True)
        ready_manifest.unlink(missing_ok=True)
    return Checkpoint.open(folder)


def settle(folder: Path) -> None:
    """End a replacement that was killed: go on when the calibration is in place, else go back."""
    waiting = folder / NEXT_MANIFEST
    if not folder.is_dir():
        return  # opening the checkpoint says what it is instead
    try:
        if waiting.is_file() and (folder / CALIBRATION).is_file():
            digest = read_json(waiting)["files"][CALIBRATION]["sha256"]
            if sha256_file(folder / CALIBRATION) == digest:
                waiting.replace(folder / MANIFEST)
        waiting.unlink(missing_ok=True)
        (folder / f"{CALIBRATION}.new").unlink(missing_ok=True)
    except (KeyError, TypeError) as error:
        raise UserError(f"{waiting} is not a manifest ({error}): remove it and run again") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be put in order: {error}") from None
