"""What one calibration run saw, piece of text by piece of text: input of heads and policy search.

A sequence is cut into SEGMENTS pieces, so that signals of its beginning can be held against damage
further on. Kept in memory, or in a file outside of the checkpoint.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedweight.checkpoint.result_file import write_result
from pagedweight.core.observation import RequestSignals
from pagedweight.errors import UserError

SEGMENTS = 8
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Measurements:
    """S sequences, G segments each, L MoE layers, E experts, kinds gate_up and down, B levels.

    length:   int64 [S, G], tokens of each segment.
    routed:   float32 [S, G, L, E], tokens routed to the expert.
    mass:     float32 [S, G, L, E], sum of routing weights r.
    features: float32 [S, G, L, E, 2, 3], sum r|x|, sum r|x|^2, max |x|: what kernels add up.
    damage:   float64 [S, G, L, E, 2, B], the segment's part of s_i^b (see `sensitivity`).
    """

    length: NDArray[np.int64]
    routed: NDArray[np.float32]
    mass: NDArray[np.float32]
    features: NDArray[np.float32]
    damage: FloatArray

    @property
    def sequences(self) -> int:
        return len(self.length)

    def signals(self, sequence: int, segments: slice = slice(None)) -> RequestSignals:
        """What a server would have seen of these segments of a sequence, undecayed."""
        return self.joined([(sequence, at) for at in range(self.length.shape[1])[segments]])

    def joined(self, pieces: Sequence[tuple[int, int]]) -> RequestSignals:
        """Signals of a text made of (sequence, segment) pieces."""
        at = tuple(np.array(pieces).T)
        features: NDArray[np.float32] = self.features[at].sum(0)
        features[..., 2] = self.features[at][..., 2].max(0)
        return RequestSignals(
            kv_blocks=1,
            tokens=float(self.length[at].sum()),
            mass=self.mass[at].sum(0),
            features=features,
        )

    def only(self, pieces: Sequence[tuple[int, int]]) -> Measurements:
        """The same with all but these (sequence, segment) pieces blank, as if they held no token;
        sequences that are blank throughout are left out."""
        kept = np.zeros(self.length.shape, bool)
        kept[tuple(np.array(pieces).T)] = True
        rows = kept.any(1)

        def of(array: NDArray[Any]) -> NDArray[Any]:
            mask = kept.reshape(kept.shape + (1,) * (array.ndim - 2))
            return np.where(mask, array, array.dtype.type(0))[rows]

        return Measurements(**{f.name: of(getattr(self, f.name)) for f in fields(self)})

    def save(self, path: Path) -> None:
        """Write all arrays (numpy's npz), whole or not at all. Raises UserError."""
        packed = io.BytesIO()
        np.savez_compressed(packed, **{f.name: getattr(self, f.name) for f in fields(self)})
        write_result(path, packed.getvalue())

    @staticmethod
    def load(path: Path, blocks: tuple[int, int, int], levels: int) -> Measurements:
        """Read what `save` wrote; `blocks` [L, E, 2] and `levels` must be the checkpoint's.

        Raises UserError when the file is none of these or of another shape.
        """
        try:
            if not zipfile.is_zipfile(path):
                Path(path).open("rb").close()  # says so when it cannot be read at all
                raise ValueError("it is not a file that --measurements wrote, or not whole")
            with np.load(path, allow_pickle=False) as stored:
                arrays: dict[str, NDArray[Any]] = {
                    f.name: stored[f.name] for f in fields(Measurements)
                }
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(f"cannot read measurements {path}: {error}") from None
        found = Measurements(**arrays)
        head = found.length.shape
        wanted = {
            "routed": (*head, *blocks[:2]),
            "mass": (*head, *blocks[:2]),
            "features": (*head, *blocks, 3),
            "damage": (*head, *blocks, levels),
        }
        wrong = [
            f"{name} is {list(arrays[name].shape)} instead of {list(shape)}"
            for name, shape in wanted.items()
            if arrays[name].shape != shape
        ]
        if len(head) != 2 or wrong:
            raise UserError(f"measurements {path} are of another model: {'; '.join(wrong)}")
        return found
