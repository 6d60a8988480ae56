"""Write a checkpoint file by file; a killed run goes on from the layers that are whole.

Every file is written under a temporary name and renamed. An unfinished folder holds PARTIAL with
the options it was started with; the manifest comes last and PARTIAL goes.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedweight.checkpoint import calibration as cal
from pagedweight.checkpoint import layout
from pagedweight.checkpoint.fingerprint import fingerprint
from pagedweight.checkpoint.layerbuffer import LayerBuffer
from pagedweight.checkpoint.manifest import (
    CALIBRATION,
    MANIFEST,
    PARTIAL,
    FileRecord,
    layer_file,
)
from pagedweight.checkpoint.shards import INDEX, read_json
from pagedweight.checkpoint.source import Progress, SourceCheckpoint
from pagedweight.checkpoint.tensorfile import (
    Entry,
    TensorFile,
    file_bytes,
    file_pieces,
    sha256_file,
    write_tensors,
)
from pagedweight.core.atomic_file import write_atomic
from pagedweight.errors import UserError

Arrays = Mapping[str, npt.NDArray[Any]]


class CheckpointWriter:
    """Writes OUT from a checked source.

    `out` must be empty or absent, unless `resume`: then it must be unfinished and come from the
    same source with the same `bits`, `table_dtype` and `options` (strings that decide the result,
    such as the calibration text and seed). Raises UserError or CheckpointError before any change
    to the folder. Memory: one layer's planes and tables, or the largest piece of a plain tensor.
    """

    def __init__(
        self,
        out: str | Path,
        source: SourceCheckpoint,
        bits: Iterable[int],
        table_dtype: str | None = None,
        resume: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.out = Path(out)
        self.source = source
        self.bits = layout.check_levels(bits)
        self.table_dtype = layout.check_dtype(table_dtype or source.table_dtype)
        self._shards = layout.plain_shards(source)
        self._entries = layout.layer_entries(source.shape, self.bits, self.table_dtype)
        self._digests: dict[str, str] = {}
        started = {
            "source": fingerprint(source),
            "bits": list(self.bits),
            "table_dtype": self.table_dtype,
            "options": dict(options or {}),
        }
        if not self._resumes(started, resume):
            self._check_space()
            (self.out / PARTIAL).mkdir(parents=True, exist_ok=True)
            self._write(f"{PARTIAL}/options.json", [json.dumps(started, indent=1).encode()])
        (self.out / "experts").mkdir(exist_ok=True)

    def _resumes(self, started: Mapping[str, object], resume: bool) -> bool:
        """Whether OUT is to be continued; raises when it may be neither begun nor continued."""
        if not self.out.exists():
            return False
        if not self.out.is_dir():
            raise UserError(f"{self.out} is a file, not a folder")
        if (self.out / MANIFEST).exists():
            raise UserError(
                f"{self.out} already holds a finished checkpoint; choose another folder"
            )
        options = self.out / PARTIAL / "options.json"
        if not options.exists():
            # A run killed before its first file leaves an empty PARTIAL: as good as empty.
            if {path.name for path in self.out.iterdir()} <= {PARTIAL}:
                return False
            raise UserError(f"{self.out} is not empty; choose another folder or empty it")
        if not resume:
            raise UserError(
                f"{self.out} holds an unfinished checkpoint; go on with --resume or remove it"
            )
        before = read_json(options)
        if changed := _differences(before, started):
            raise UserError(
                f"{self.out} was begun differently, so it cannot be resumed: {'; '.join(changed)}"
            )
        for leftover in [*self.out.glob(".*.tmp"), *self.out.glob("*/.*.tmp")]:
            leftover.unlink()
        return True

    def _check_space(self) -> None:
        need = sum(layout.predicted_bytes(self.source, self.bits, self.table_dtype).values())
        place = next(p for p in [self.out, *self.out.absolute().parents] if p.exists())
        free = shutil.disk_usage(place).free
        if free < need:
            raise UserError(
                f"{self.out} needs {need:,} bytes and the disk has {free:,} free: "
                f"make room or choose another place"
            )

    def buffer(self) -> LayerBuffer:
        """An empty layer to put linear blocks into one at a time."""
        return LayerBuffer(self.source.shape, self.bits)

    def write_layer(
        self,
        layer_pos: int,
        codes: Mapping[str, npt.NDArray[np.uint8]],
        tables: Mapping[str, Mapping[int, npt.NDArray[np.uint16]]],
        measured: Arrays | None = None,
    ) -> None:
        """Write a whole layer: by kind, codes [E, N, K] and per level raw tables [E, N, 2^b]."""
        buffer = self.buffer()
        for kind in codes:
            for expert in range(self.source.shape.experts):
                levels = {b: table[expert] for b, table in tables[kind].items()}
                buffer.put(expert, kind, codes[kind][expert], levels)
        self.write_buffer(layer_pos, buffer, measured)

    def write_buffer(
        self, layer_pos: int, buffer: LayerBuffer, measured: Arrays | None = None
    ) -> None:
        """Write a filled buffer. `measured` (this layer's calibration arrays) is kept until
        `finish` and is there for a resumed run to read."""
        name = self._layer_name(layer_pos)
        if measured is not None:
            entries = cal.entries_of(measured)
            self._write_tensors(
                self._measured_name(layer_pos), entries.values(), map(_bytes, measured.values())
            )
        self._write_tensors(name, self._entries, buffer.data(self.table_dtype))

    def measured(self, layer_pos: int) -> dict[str, npt.NDArray[Any]]:
        """What `write_layer` was given as `measured` for a layer that is done."""
        file = TensorFile.open(self.out / self._measured_name(layer_pos))
        return {name: cal.read_array(file, name) for name in file.tensors}

    def done_layers(self) -> list[int]:
        """Positions of the layers that are whole on disk."""
        return [
            pos
            for pos in range(len(self.source.moe_layers))
            if self._is_whole(self._layer_name(pos), self._entries)
        ]

    def copy_plain(self, progress: Progress | None = None) -> None:
        """Copy every tensor that is not a routed expert, byte for byte, and the other files."""
        for shard in self._shards:
            if self._is_whole(shard.name, shard.entries, layout.PLAIN_METADATA):
                if progress:
                    progress(sum(entry.nbytes for entry in shard.entries))
                continue
            data = self._plain_bytes(shard, progress)
            self._write_tensors(shard.name, shard.entries, data, layout.PLAIN_METADATA)
        self._write(INDEX, [layout.index_json(self._shards)])
        for name in layout.sidecars(self.source.path):
            (self.out / name).parent.mkdir(exist_ok=True)
            self._write(name, file_pieces(self.source.path / name))

    def finish(self, calibration: Arrays, metadata: Mapping[str, str]) -> None:
        """Write calibration, config.json and, last, the manifest.

        `calibration` holds the arrays of docs/format.md by name. Raises CheckpointError when they
        break the schema, ValueError when layers or plain tensors have not been written.
        """
        layers, shape = len(self.source.moe_layers), self.source.shape
        arrays = {name: np.ascontiguousarray(array) for name, array in calibration.items()}
        entries = cal.entries_of(arrays)
        cal.check_entries("calibration", entries, shape, layers, len(self.bits))
        cal.check_metadata("calibration", metadata)
        cal.check_arrays("calibration", arrays)
        missing = sorted(set(range(layers)) - set(self.done_layers()))
        absent = [s.name for s in self._shards if not (self.out / s.name).exists()]
        if missing or absent:
            raise ValueError(f"not written yet: layers {missing}, files {absent}")
        self._write_tensors(CALIBRATION, entries.values(), map(_bytes, arrays.values()), metadata)
        self._write("config.json", [layout.config_json(self.source, self.bits, self.table_dtype)])
        unseen = np.argwhere(arrays["tokens"] == 0)
        manifest = dataclasses.replace(
            layout.empty_manifest(self.source, self.bits, self.table_dtype),
            files={name: self._record(name) for name in self._final_files()},
            unseen_experts=tuple((self.source.moe_layers[pos], int(e)) for pos, e in unseen),
        )
        self._write(MANIFEST, [manifest.encode()])
        shutil.rmtree(self.out / PARTIAL)

    def _final_files(self) -> list[str]:
        plain = [*(shard.name for shard in self._shards), INDEX]
        layers = [self._layer_name(pos) for pos in range(len(self.source.moe_layers))]
        return [*plain, *layout.sidecars(self.source.path), *layers, CALIBRATION, "config.json"]

    def _record(self, name: str) -> FileRecord:
        """Size and checksum; read back from disk for files that an earlier run wrote."""
        path = self.out / name
        digest = self._digests.get(name) or sha256_file(path)
        return FileRecord(path.stat().st_size, digest)

    def _layer_name(self, layer_pos: int) -> str:
        return layer_file(self.source.moe_layers[layer_pos])

    def _measured_name(self, layer_pos: int) -> str:
        return f"{PARTIAL}/measured-{self.source.moe_layers[layer_pos]:05d}.safetensors"

    def _is_whole(
        self,
        name: str,
        entries: Iterable[Entry],
        metadata: Mapping[str, str] | None = None,
    ) -> bool:
        path = self.out / name
        if not path.is_file() or path.stat().st_size != file_bytes(entries, metadata):
            return False
        stored = TensorFile.open(path).tensors.values()
        return [s.entry for s in sorted(stored, key=lambda s: s.offset)] == list(entries)

    def _plain_bytes(
        self, shard: layout.Shard, progress: Progress | None
    ) -> Iterator[bytes | bytearray]:
        for entry in shard.entries:
            for chunk in self.source.files[entry.name].chunks(entry.name):
                yield chunk
                if progress:
                    progress(len(chunk))

    def _write(self, name: str, pieces: Iterable[bytes | bytearray]) -> None:
        _, self._digests[name] = write_atomic(self.out / name, pieces)

    def _write_tensors(
        self,
        name: str,
        entries: Iterable[Entry],
        data: Iterable[bytes | bytearray | memoryview],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._digests[name] = write_tensors(self.out / name, entries, data, metadata)


def _differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Each option that differs, with both values; nested options are compared one by one."""
    changed = []
    for key in sorted({*before, *now}):
        was, is_now = before.get(key), now.get(key)
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            changed += _differences(was, is_now)
        elif was != is_now:
            changed.append(f"{key} was {was}, is {is_now}")
    return changed


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array)).cast("B")
