"""calibration.safetensors: what was measured while quantizing, with its schema checked.

L MoE layers, E experts, kinds (gate_up, down), levels in the order of the stored bits. The table of
tensors is in `docs/format.md`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedweight.checkpoint.tensorfile import Entry, TensorFile
from pagedweight.core.geometry import KINDS, LayerShape
from pagedweight.errors import CheckpointError

Array = npt.NDArray[np.float32]
NUMPY_DTYPES = {"F32": "<f4", "I64": "<i8", "I32": "<i4", "F64": "<f8"}
NAMES = {np.dtype(v): k for k, v in NUMPY_DTYPES.items()}
METADATA = ("text", "sequences", "sequence_length", "seed")
"""Strings that the file's metadata must have."""


@dataclass(frozen=True)
class Calibration:
    """tokens int64 [L, E]; mass float32 [L, E]; second_moment by kind [L, E, K]; error and
    sensitivity [L, E, 2, levels] (sensitivity None when not measured); residual heads by name."""

    tokens: npt.NDArray[np.int64]
    mass: Array
    second_moment: Mapping[str, Array]
    error: Array
    sensitivity: Array | None
    residual: Mapping[str, Array]
    metadata: Mapping[str, str]

    @property
    def unseen(self) -> list[tuple[int, int]]:
        """(layer position, expert) of experts that no token was routed to."""
        return [(int(pos), int(expert)) for pos, expert in np.argwhere(self.tokens == 0)]

    def damage(self) -> Array:
        """s_i^b of eq. 2 [L, E, 2, levels]; `tokens * error` where gradients were not taken."""
        if self.sensitivity is not None:
            return self.sensitivity
        return (self.tokens[:, :, None, None] * self.error).astype(np.float32)


def required_entries(shape: LayerShape, layers: int, levels: int) -> list[Entry]:
    """The tensors every calibration file has."""
    blocks = dict(zip(KINDS, shape.blocks, strict=True))
    return [
        Entry("tokens", "I64", (layers, shape.experts)),
        Entry("mass", "F32", (layers, shape.experts)),
        *(
            Entry(f"second_moment.{kind}", "F32", (layers, shape.experts, block.cols))
            for kind, block in blocks.items()
        ),
        Entry("error", "F32", (layers, shape.experts, 2, levels)),
    ]


def check_entries(
    where: str, found: Mapping[str, Entry], shape: LayerShape, layers: int, levels: int
) -> None:
    """Names, types and shapes; raises CheckpointError listing every tensor that is wrong."""
    required = required_entries(shape, layers, levels)
    faults = [f"{e.name} is missing" for e in required if e.name not in found]
    optional = Entry("sensitivity", "F32", (layers, shape.experts, 2, levels))
    for entry in [*required, optional]:
        got = found.get(entry.name)
        if got is not None and got != entry:
            faults.append(
                f"{entry.name} is {got.dtype} {list(got.shape)} instead of "
                f"{entry.dtype} {list(entry.shape)}"
            )
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults)}")


def check_arrays(where: str, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Values: finite, not negative, mass summing to 1 in a layer with any token."""
    faults = []
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            at = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            faults.append(f"{name}{list(at)} is {array[at]}")
        elif not name.startswith("residual.") and (np.asarray(array) < 0).any():
            faults.append(f"{name} has a negative value")
    mass, tokens = np.asarray(arrays["mass"], np.float64), np.asarray(arrays["tokens"])
    total, seen = mass.sum(axis=1), (tokens > 0).any(axis=1)
    if off := [int(n) for n in np.flatnonzero(np.abs(total - seen) > 1e-3)]:
        faults.append(f"mass does not sum to 1 (0 without tokens) in MoE layers {off}")
    if faults:
        raise CheckpointError(f"{where}: {'; '.join(faults)}")


def entries_of(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Entry]:
    """Entries that describe arrays in memory; raises CheckpointError for a type not in use."""
    odd = [f"{n} ({a.dtype})" for n, a in arrays.items() if a.dtype not in NAMES]
    if odd:
        raise CheckpointError(f"calibration: types that the format does not use: {', '.join(odd)}")
    return {n: Entry(n, NAMES[a.dtype], tuple(a.shape)) for n, a in arrays.items()}


def check_metadata(where: str, metadata: Mapping[str, str]) -> None:
    """The strings that say what text was used."""
    if absent := [key for key in METADATA if not isinstance(metadata.get(key), str)]:
        raise CheckpointError(f"{where}: the metadata lacks {', '.join(absent)}")


def read_calibration(
    file: TensorFile, shape: LayerShape, layers: int, bits: Sequence[int]
) -> Calibration:
    """Check and load the file."""
    where = str(file.path)
    found = {name: stored.entry for name, stored in file.tensors.items()}
    check_entries(where, found, shape, layers, len(bits))
    check_metadata(where, file.metadata)
    arrays = {name: read_array(file, name) for name in found if _known(name)}
    check_arrays(where, arrays)
    return Calibration(
        tokens=arrays["tokens"],
        mass=arrays["mass"],
        second_moment={kind: arrays[f"second_moment.{kind}"] for kind in KINDS},
        error=arrays["error"],
        sensitivity=arrays.get("sensitivity"),
        residual={n: a for n, a in arrays.items() if n.startswith("residual.")},
        metadata=dict(file.metadata),
    )


def _known(name: str) -> bool:
    known = (
        "tokens",
        "mass",
        "error",
        "sensitivity",
        "second_moment.gate_up",
        "second_moment.down",
    )
    return name in known or name.startswith("residual.")


def read_array(file: TensorFile, name: str) -> npt.NDArray[Any]:
    """One tensor as a numpy array; raises CheckpointError for a type the format does not use."""
    entry = file.tensors[name].entry
    if entry.dtype not in NUMPY_DTYPES:
        raise CheckpointError(f"{file.path}: {name} has type {entry.dtype}")
    return np.frombuffer(file.read(name), NUMPY_DTYPES[entry.dtype]).reshape(entry.shape)
