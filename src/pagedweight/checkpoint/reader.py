"""Open a finished checkpoint: check it whole from manifest and headers, then map its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedweight.checkpoint import calibration as cal
from pagedweight.checkpoint.layout import layer_entries
from pagedweight.checkpoint.manifest import (
    CALIBRATION,
    NEXT_MANIFEST,
    Manifest,
    check_version,
    layer_file,
    quantization_config,
)
from pagedweight.checkpoint.packing import unpack, unpad_tables
from pagedweight.checkpoint.shards import open_shards, read_json
from pagedweight.checkpoint.source import Progress
from pagedweight.checkpoint.tensorfile import Entry, TensorFile, sha256_file
from pagedweight.core.geometry import KINDS, LayerShape
from pagedweight.errors import CheckpointError, listing


@dataclass(frozen=True)
class LayerViews:
    """One layer, mapped read-only: nothing is copied and pages are read when touched.

    planes by kind: uint32 [P, E, R, C, 32]; tables by kind and level: uint16 [E, padded rows, 2^b],
    raw bits of `Checkpoint.table_dtype`. Every array starts at a multiple of 128 bytes.
    """

    planes: Mapping[str, npt.NDArray[np.uint32]]
    tables: Mapping[str, Mapping[int, npt.NDArray[np.uint16]]]


@dataclass(frozen=True)
class Checkpoint:
    """A pagedweight checkpoint that has passed the checks of `docs/format.md`."""

    path: Path
    manifest: Manifest
    layers: tuple[TensorFile, ...]

    @staticmethod
    def open(path: str | Path) -> Checkpoint:
        """Check manifest, files, and every header; raises CheckpointError naming what is wrong."""
        folder = Path(path)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder")
        manifest = Manifest.read(folder)
        _check_config(folder, manifest)
        _check_files(folder, manifest)
        wanted = layer_entries(manifest.shape, manifest.bits, manifest.table_dtype)
        layers = tuple(TensorFile.open(folder / layer_file(n)) for n in manifest.moe_layers)
        for file in layers:
            _check_layer(file, wanted)
        found = TensorFile.open(folder / CALIBRATION).tensors
        cal.check_entries(
            str(folder / CALIBRATION),
            {name: stored.entry for name, stored in found.items()},
            manifest.shape,
            len(layers),
            len(manifest.bits),
        )
        open_shards(folder)
        return Checkpoint(folder, manifest, layers)

    @property
    def shape(self) -> LayerShape:
        return self.manifest.shape

    @property
    def bits(self) -> tuple[int, ...]:
        """Stored levels, ascending."""
        return self.manifest.bits

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layer numbers; everything else counts positions in this tuple."""
        return self.manifest.moe_layers

    @property
    def table_dtype(self) -> str:
        """Type of the centroids: "bfloat16" or "float16"."""
        return self.manifest.table_dtype

    @property
    def activation(self) -> str:
        return self.manifest.activation

    @property
    def top_k(self) -> int:
        return self.manifest.top_k

    def position(self, layer: int) -> int:
        """Position of a decoder layer among the MoE layers; raises CheckpointError if dense."""
        if layer not in self.moe_layers:
            raise CheckpointError(f"layer {layer} of {self.path} has no routed experts")
        return self.moe_layers.index(layer)

    def layer(self, layer_pos: int) -> LayerViews:
        """Map one layer's file. The views keep the mapping alive."""
        file = self.layers[layer_pos]
        raw = np.memmap(file.path, np.uint8, mode="r")

        def view(name: str, dtype: str) -> npt.NDArray[Any]:
            stored = file.tensors[name]
            part = raw[stored.offset : stored.offset + stored.entry.nbytes]
            return part.view(np.ndarray).view(dtype).reshape(stored.entry.shape)

        return LayerViews(
            planes={kind: view(f"{kind}.planes", "<u4") for kind in KINDS},
            tables={
                kind: {b: view(f"{kind}.table.{b}", "<u2") for b in self.bits} for kind in KINDS
            },
        )

    def dequantize(
        self,
        layer_pos: int,
        expert: int,
        kind: str,
        bits: int,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """The [N, K] weights of one linear block at `bits`, in `dtype`."""
        if bits not in self.bits:
            raise CheckpointError(
                f"{self.path} stores {self.bits[0]} to {self.bits[-1]} bits, not {bits}"
            )
        block = self.shape.blocks[KINDS.index(kind)]
        views = self.layer(layer_pos)
        codes = unpack(views.planes[kind][:bits, expert], block)
        table = unpad_tables(views.tables[kind][bits][expert], block)
        values = np.take_along_axis(table, codes.astype(np.intp), axis=1)
        return (
            torch.from_numpy(values.view(np.int16)).view(getattr(torch, self.table_dtype)).to(dtype)
        )

    def calibration(self) -> cal.Calibration:
        """Load what was measured while quantizing; raises CheckpointError on a broken schema."""
        file = TensorFile.open(self.path / CALIBRATION)
        return cal.read_calibration(file, self.shape, len(self.layers), self.bits)

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Compare every file with the manifest's checksum; names of those that differ."""
        changed = []
        for name, record in self.manifest.files.items():
            if sha256_file(self.path / name) != record.sha256:
                changed.append(name)
            if progress:
                progress(record.bytes)
        return changed


def _check_config(folder: Path, manifest: Manifest) -> None:
    """config.json is what vLLM reads first; it must tell the same story as the manifest."""
    found = read_json(folder / "config.json").get("quantization_config")
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{folder / 'config.json'} has no quantization_config")
    check_version(folder / "config.json", found)
    wanted = quantization_config(manifest.bits, manifest.table_dtype)
    if wrong := [
        f"{k} is {found.get(k)}, the manifest says {v}"
        for k, v in wanted.items()
        if found.get(k) != v
    ]:
        raise CheckpointError(f"{folder / 'config.json'}: {'; '.join(wrong)}")


def _check_files(folder: Path, manifest: Manifest) -> None:
    """All files there; weight files of the recorded size. Text files may be edited by hand."""
    missing = [name for name in manifest.files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks files of its manifest: {listing(missing)}")
    sizes = {name: (folder / name).stat().st_size for name in manifest.files}
    wrong = [
        f"{name} has {sizes[name]} bytes instead of {record.bytes}"
        for name, record in manifest.files.items()
        if name.endswith(".safetensors") and sizes[name] != record.bytes
    ]
    if wrong and (folder / NEXT_MANIFEST).exists():
        raise CheckpointError(
            f"{folder}: calibration was being replaced when that was stopped; "
            f"run `pagedweight calibrate` again to end it"
        )
    if wrong:
        raise CheckpointError(f"{folder}: damaged files: {listing(wrong)}; copy them again")


def _check_layer(file: TensorFile, wanted: list[Entry]) -> None:
    faults = []
    for entry in wanted:
        stored = file.tensors.get(entry.name)
        if stored is None:
            faults.append(f"{entry.name} is missing")
        elif stored.entry != entry:
            got = stored.entry
            faults.append(
                f"{entry.name} is {got.dtype} {list(got.shape)} instead of "
                f"{entry.dtype} {list(entry.shape)}"
            )
        elif stored.offset % 4:
            faults.append(f"{entry.name} starts at byte {stored.offset}, not a multiple of 4")
    if faults:
        raise CheckpointError(f"{file.path}: {listing(faults)}")
