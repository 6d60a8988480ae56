"""MODEL to OUT, a layer at a time: check, copy, measure, quantize, write.

Nothing is written before every value of the source has been read and found finite. Layers are
written whole; a killed run resumed with the same options ends in the same bytes, because moments
are measured again from the start (the forward pass is cheap beside the quantizing it feeds).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagedweight.calibrate.moments import LayerMoments
from pagedweight.calibrate.text import NO_CALIBRATION, CalibrationTokens
from pagedweight.checkpoint.manifest import MANIFEST, PARTIAL
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.checkpoint.writer import CheckpointWriter
from pagedweight.core.geometry import KINDS
from pagedweight.errors import CheckpointError, UserError, listing
from pagedweight.kernels.device import device_of
from pagedweight.quantize.centroids import TORCH_DTYPE
from pagedweight.quantize.layer import ReadExpert, quantize_layer

Codes = Literal["kmeans", "compensated"]
Arrays = dict[str, npt.NDArray[Any]]
Report = Callable[[str, int, int], None]
"""(stage, units done since the last call, units in all): stages "check", "copy" in bytes, "layers"
in linear blocks."""


@dataclass(frozen=True)
class QuantizeOptions:
    """What decides the result, and how to get there.

    table_dtype None: the source's type when it has 16 bits, else bfloat16. calibration None:
    every column of a linear block counts the same. codes None: "compensated" (docs/codes.md) where
    there is a calibration, else "kmeans".
    """

    bits: tuple[int, ...] = (2, 3, 4, 5, 6)
    table_dtype: str | None = None
    calibration: CalibrationTokens | None = None
    device: str = "cpu"
    resume: bool = False
    codes: Codes | None = None

    @property
    def compensated(self) -> bool:
        """Whether codes are compensated; UserError when there is nothing to compensate by."""
        if self.codes == "compensated" and self.calibration is None:
            raise UserError(
                "--codes compensated fits to how inputs go together, so it needs --calibration FILE"
            )
        return self.calibration is not None and self.codes != "kmeans"


@dataclass(frozen=True)
class QuantizeResult:
    """tokens int64 [L, E], error float32 [L, E, 2, levels] and the decoder layer numbers.

    plain_kept int64 [L, E, 2]: linear blocks whose compensated codes were given up; None when codes
    are k-means.
    """

    moe_layers: tuple[int, ...]
    tokens: npt.NDArray[np.int64]
    error: npt.NDArray[np.float32]
    plain_kept: npt.NDArray[np.int64] | None = None

    @property
    def unseen(self) -> list[tuple[int, int]]:
        """(decoder layer, expert) of experts without a calibration token."""
        return [(self.moe_layers[pos], int(e)) for pos, e in np.argwhere(self.tokens == 0)]


class Measurer(Protocol):
    """Source of moments, decoder layer by decoder layer, in order."""

    def advance(self, layer: int) -> tuple[LayerMoments, ReadExpert] | None:
        """Moments and weights of a decoder layer; None when it has no routed experts."""


class Unmeasured:
    """Uniform moments; weights are read one linear block at a time."""

    def __init__(self, source: SourceCheckpoint) -> None:
        self.source = source

    def advance(self, layer: int) -> tuple[LayerMoments, ReadExpert] | None:
        if layer not in self.source.moe_layers:
            return None
        position = self.source.moe_layers.index(layer)
        return (
            LayerMoments.uniform(self.source.shape),
            lambda expert, kind: self.source.expert(position, expert, kind),
        )


def quantize_checkpoint(
    source: SourceCheckpoint, out: Path, options: QuantizeOptions, report: Report
) -> QuantizeResult:
    """Write the checkpoint `out`; raises UserError or CheckpointError before anything is written
    when the source, the folder or the options do not do."""
    device, compensated = device_of(options.device), options.compensated
    table_dtype = options.table_dtype or source.table_dtype
    going_on = (out / PARTIAL / "options.json").exists() and options.resume
    if not going_on:
        _refuse_occupied(out, options.resume)
        source.check_values(lambda n: report("check", n, source.total_bytes))
        _check_range(source, table_dtype)
    calibration = options.calibration
    metadata = dict(calibration.metadata if calibration else NO_CALIBRATION)
    metadata["codes"] = "compensated" if compensated else "kmeans"
    decides = {**metadata, "device": device.type}
    writer = CheckpointWriter(out, source, options.bits, table_dtype, options.resume, decides)
    plain = sum(source.nbytes(name) for name in source.plain_names())
    writer.copy_plain(lambda n: report("copy", n, plain))
    measured = _layers(source, writer, _measurer(source, options, device, out), device, report)
    arrays = {name: np.stack([layer[name] for layer in measured]) for name in measured[0]}
    writer.finish(arrays, metadata)
    kept = arrays.get("plain_kept")
    return QuantizeResult(source.moe_layers, arrays["tokens"], arrays["error"], kept)


def _layers(
    source: SourceCheckpoint,
    writer: CheckpointWriter,
    measurer: Measurer,
    device: torch.device,
    report: Report,
) -> list[Arrays]:
    """Quantize and write every layer that is not there yet; each layer's calibration arrays."""
    blocks = len(KINDS) * source.shape.experts
    total = blocks * len(source.moe_layers)
    done = set(writer.done_layers())
    open_layers = [n for pos, n in enumerate(source.moe_layers) if pos not in done]
    report("layers", blocks * len(done), total)
    for layer in range(max(open_layers, default=-1) + 1):
        _layer(
            layer,
            layer in open_layers,
            writer,
            measurer,
            device,
            lambda: report("layers", 1, total),
        )
    return [writer.measured(pos) for pos in range(len(source.moe_layers))]


def _layer(
    layer: int,
    wanted: bool,
    writer: CheckpointWriter,
    measurer: Measurer,
    device: torch.device,
    done: Callable[[], None],
) -> None:
    """Measure one decoder layer and write it if it is `wanted`. What was measured goes on return,
    before the next layer's is made: products can be larger than weights."""
    found = measurer.advance(layer)
    if found is None or not wanted:
        return
    moments, read = found
    buffer = writer.buffer()
    arrays = quantize_layer(read, moments, buffer, writer.table_dtype, device, done)
    writer.write_buffer(writer.source.moe_layers.index(layer), buffer, arrays)


def _measurer(
    source: SourceCheckpoint, options: QuantizeOptions, device: torch.device, out: Path
) -> Measurer:
    if options.calibration is None:
        return Unmeasured(source)
    from pagedweight.calibrate.stream import StreamedMoments  # imports transformers: seconds

    return StreamedMoments(
        source, options.calibration.tokens, device, out / PARTIAL, options.compensated
    )


def _refuse_occupied(out: Path, resume: bool) -> None:
    """What the writer would refuse, but before the source is read."""
    if (out / MANIFEST).exists():
        raise UserError(f"{out} already holds a finished checkpoint; choose another folder")
    if (out / PARTIAL).exists() and not resume:
        raise UserError(f"{out} holds an unfinished checkpoint; go on with --resume or remove it")
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / PARTIAL).exists()):
        raise UserError(f"{out} is not an empty folder; choose another one or empty it")


def _check_range(source: SourceCheckpoint, table_dtype: str) -> None:
    """Every expert weight must have a finite centroid; only another type can fail that."""
    dtype = TORCH_DTYPE[table_dtype]
    if dtype == source.dtype:
        return
    limit = torch.finfo(dtype).max
    over: Mapping[str, float] = {
        f"layer {layer} expert {expert} {kind}": largest
        for position, layer in enumerate(source.moe_layers)
        for expert in range(source.shape.experts)
        for kind in KINDS
        if (largest := float(source.expert(position, expert, kind).abs().max())) > limit
    }
    if over:
        found = listing(f"{name} ({largest:g})" for name, largest in over.items())
        raise CheckpointError(
            f"{len(over)} linear blocks have weights beyond {table_dtype}'s {limit:g}: {found}; "
            f"leave --table-dtype out or choose the other type"
        )
