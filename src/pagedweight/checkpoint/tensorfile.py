"""Safetensors files, read and written in pieces so that memory stays bounded.

The format is an 8-byte little-endian header length, a JSON header and the tensors' bytes
(https://github.com/huggingface/safetensors, "Format"). Headers are checked in full before any
weight is read. Files are written under a temporary name and renamed when they are whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedweight.core.atomic_file import write_atomic
from pagedweight.errors import CheckpointError

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
HEADER_LIMIT = 100_000_000
"""Largest header in bytes, the limit of the reference implementation."""
CHUNK_BYTES = 8 << 20
ALIGNMENT = 128
"""Headers are padded to this many bytes: one tile of a plane, so mapped planes are aligned."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: safetensors dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry and where its bytes lie: `offset` counts from the start of the file."""

    entry: Entry
    offset: int


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file whose header has been read and found sound."""

    path: Path
    tensors: Mapping[str, Stored]
    metadata: Mapping[str, str]

    @staticmethod
    def open(path: Path) -> TensorFile:
        """Read and check the header of `path`; raises CheckpointError naming the file."""
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(HEADER_LIMIT, size - 8):
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file: its {size} bytes do not hold "
                    f"a header of {length if size >= 8 else 'any'} bytes; fetch it again"
                )
            raw = file.read(length)
        try:
            header = json.loads(raw)
            metadata = header.pop("__metadata__", None) or {}
            tensors = {name: _stored(name, item, 8 + length) for name, item in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the header of {path} cannot be read: {error}") from error
        _check_layout(path, tensors, 8 + length, size)
        return TensorFile(path, tensors, metadata)

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytearray:
        """Bytes of a tensor, or `nbytes` of them from byte `start` of the tensor on."""
        whole = self.tensors[name].entry.nbytes
        data = bytearray(whole - start if nbytes is None else nbytes)
        self.read_into(name, memoryview(data), start)
        return data

    def read_into(self, name: str, data: memoryview, start: int = 0) -> None:
        """Fill `data` (of bytes) from byte `start` of a tensor on."""
        stored = self.tensors[name]
        if start + len(data) > stored.entry.nbytes:
            raise ValueError(f"read past the end of {name!r}")
        with self.path.open("rb", buffering=0) as file:
            file.seek(stored.offset + start)
            done = 0
            while done < len(data):
                got = file.readinto(data[done:])
                if not got:
                    raise CheckpointError(f"{self.path} became shorter while it was read")
                done += got

    def chunks(self, name: str) -> Iterator[bytearray]:
        """A tensor's bytes in pieces of at most CHUNK_BYTES (a multiple of 8)."""
        total = self.tensors[name].entry.nbytes
        for start in range(0, total, CHUNK_BYTES):
            yield self.read(name, start, min(CHUNK_BYTES, total - start))


def _stored(name: str, item: dict[str, Any], base: int) -> Stored:
    shape = tuple(int(n) for n in item["shape"])
    if item["dtype"] not in DTYPE_BITS:
        raise ValueError(f"tensor {name!r} has unknown type {item['dtype']!r}")
    if any(n < 0 for n in shape):
        raise ValueError(f"tensor {name!r} has shape {list(shape)}")
    entry = Entry(name, item["dtype"], shape)
    begin, end = item["data_offsets"]
    if end - begin != entry.nbytes:
        raise ValueError(
            f"tensor {name!r} of shape {list(shape)} and type {entry.dtype} needs {entry.nbytes} "
            f"bytes and has {end - begin}"
        )
    return Stored(entry, base + begin)


def _check_layout(path: Path, tensors: Mapping[str, Stored], base: int, size: int) -> None:
    """Tensors must fill the file from `base` to `size` without holes or overlaps."""
    position = base
    for stored in sorted(tensors.values(), key=lambda s: (s.offset, s.entry.nbytes)):
        if stored.offset != position:
            raise CheckpointError(
                f"{path}: tensor {stored.entry.name!r} starts at byte {stored.offset}, "
                f"expected {position}"
            )
        position += stored.entry.nbytes
    if position != size:
        what = "truncated" if size < position else "longer than its tensors"
        raise CheckpointError(
            f"{path} is {what}: {size} bytes on disk, {position} by its header; fetch it again"
        )


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Length and JSON header for `entries` laid out in order, padded to ALIGNMENT bytes."""
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    position = 0
    for entry in entries:
        end = position + entry.nbytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    return len(raw).to_bytes(8, "little") + raw


def file_bytes(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> int:
    """Size on disk of a file that `write_tensors` would write."""
    entries = list(entries)
    return len(encode_header(entries, metadata)) + sum(e.nbytes for e in entries)


def write_tensors(
    path: Path,
    entries: Iterable[Entry],
    data: Iterable[bytes | bytearray | memoryview],
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Stream `data` (the entries' bytes, in order, in pieces of any size) to `path`; its sha256."""
    entries = list(entries)
    expected = sum(entry.nbytes for entry in entries)

    def pieces() -> Iterator[bytes | bytearray | memoryview]:
        yield encode_header(entries, metadata)
        yield from data

    written, digest = write_atomic(path, pieces())
    if written != expected + len(encode_header(entries, metadata)):
        path.unlink()
        raise ValueError(f"{path}: wrote {written} bytes for tensors of {expected} bytes")
    return digest


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    for piece in file_pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def file_pieces(path: Path) -> Iterator[bytes]:
    """A file's bytes in pieces of at most CHUNK_BYTES."""
    with path.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece
