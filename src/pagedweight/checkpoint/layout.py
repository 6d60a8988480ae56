"""The files of a checkpoint before they exist: names, tensors in order, and sizes in bytes.

The writer writes by this and `predicted_bytes` adds it up, so that what `--dry-run` says and what
lies on disk cannot drift apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pagedweight.checkpoint.calibration import required_entries
from pagedweight.checkpoint.manifest import (
    CALIBRATION,
    MANIFEST,
    TABLE_DTYPES,
    FileRecord,
    Manifest,
    bits_problems,
    layer_file,
    quantization_config,
)
from pagedweight.checkpoint.shards import INDEX
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.checkpoint.tensorfile import Entry, file_bytes
from pagedweight.core.geometry import KINDS, LayerShape
from pagedweight.errors import UserError

SHARD_BYTES = 4 << 30
"""Most bytes of tensors in one shard of non-expert weights; a larger tensor gets its own."""
PLAIN_METADATA = {"format": "pt"}
"""transformers refuses a weight file without it."""
WEIGHT_SUFFIXES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz",
    ".index.json", ".md5", ".zip", ".tar",
}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """One file of non-expert tensors."""

    name: str
    entries: tuple[Entry, ...]


def check_levels(bits: Iterable[int]) -> tuple[int, ...]:
    """`bits` as a tuple; raises UserError when they cannot be stored."""
    levels = tuple(int(b) for b in bits)
    if problems := bits_problems(levels):
        raise UserError(f"--bits: {'; '.join(problems)}; for example 2-6")
    return levels


def check_dtype(dtype: str) -> str:
    """`dtype` as it is; raises UserError for a type that centroids cannot have."""
    if dtype not in TABLE_DTYPES:
        raise UserError(f"lookup tables hold {' or '.join(TABLE_DTYPES)}, not {dtype}")
    return dtype


def layer_entries(shape: LayerShape, bits: Sequence[int], table_dtype: str) -> list[Entry]:
    """Tensors of a layer file in file order: planes of both kinds, then tables by kind and level.

    Every size is a multiple of 128 bytes, so with an aligned header every tensor is aligned.
    """
    blocks = dict(zip(KINDS, shape.blocks, strict=True))
    entries = [
        Entry(
            f"{kind}.planes",
            "I32",
            (max(bits), shape.experts, block.row_tiles, block.col_tiles, 32),
        )
        for kind, block in blocks.items()
    ]
    for kind, block in blocks.items():
        for b in bits:
            size = (shape.experts, block.padded_rows, 1 << b)
            entries.append(Entry(f"{kind}.table.{b}", TABLE_DTYPES[table_dtype], size))
    return entries


def plain_shards(source: SourceCheckpoint) -> list[Shard]:
    """The source's non-expert tensors, in its order, in files of at most SHARD_BYTES."""
    groups: list[list[Entry]] = [[]]
    used = 0
    for name in source.plain_names():
        entry = source.files[name].tensors[name].entry
        if groups[-1] and used + entry.nbytes > SHARD_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(entry)
        used += entry.nbytes
    total = len(groups)
    return [
        Shard(f"model-{number:05d}-of-{total:05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, start=1)
    ]


def index_json(shards: Sequence[Shard]) -> bytes:
    """model.safetensors.index.json for the non-expert tensors."""
    weight_map = {entry.name: shard.name for shard in shards for entry in shard.entries}
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=1) + "\n").encode()


def config_json(source: SourceCheckpoint, bits: Sequence[int], table_dtype: str) -> bytes:
    """The source's config.json with the quantization_config added."""
    content = {**source.config, "quantization_config": quantization_config(bits, table_dtype)}
    return (json.dumps(content, indent=1) + "\n").encode()


def sidecars(folder: Path) -> list[str]:
    """Files to copy byte for byte: all beside config.json that are not weights, and chat templates.

    Hidden files are left out.
    """
    extra = folder / "additional_chat_templates"
    found = [*folder.iterdir(), *(extra.iterdir() if extra.is_dir() else ())]
    return sorted(
        path.relative_to(folder).as_posix()
        for path in found
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in {"config.json", MANIFEST}
        and not any(path.name.endswith(suffix) for suffix in WEIGHT_SUFFIXES)
    )


def empty_manifest(source: SourceCheckpoint, bits: tuple[int, ...], table_dtype: str) -> Manifest:
    """The manifest without files and unseen experts."""
    return Manifest(
        architecture=source.architecture.name,
        activation=source.activation,
        bits=bits,
        table_dtype=table_dtype,
        shape=source.shape,
        top_k=source.top_k,
        num_hidden_layers=source.num_hidden_layers,
        moe_layers=source.moe_layers,
        source={
            "name": source.path.resolve().name,
            "tensors": len(source.files),
            "bytes": source.total_bytes,
        },
        files={},
        unseen_experts=(),
    )


def predicted_bytes(
    source: SourceCheckpoint, bits: Iterable[int], table_dtype: str | None = None
) -> dict[str, int]:
    """File to bytes on disk, for every file a checkpoint of `source` at `bits` will have.

    Exact for weights, tables and copies. calibration.safetensors is counted without its optional
    tensors and metadata, the manifest without unseen experts.
    """
    levels = check_levels(bits)
    dtype = check_dtype(table_dtype or source.table_dtype)
    shards = plain_shards(source)
    sizes = {shard.name: file_bytes(shard.entries, PLAIN_METADATA) for shard in shards}
    sizes[INDEX] = len(index_json(shards))
    sizes |= {name: (source.path / name).stat().st_size for name in sidecars(source.path)}
    layer = file_bytes(layer_entries(source.shape, levels, dtype))
    sizes |= {layer_file(n): layer for n in source.moe_layers}
    sizes[CALIBRATION] = file_bytes(
        required_entries(source.shape, len(source.moe_layers), len(levels))
    )
    sizes["config.json"] = len(config_json(source, levels, dtype))
    draft = empty_manifest(source, levels, dtype)
    files = {name: FileRecord(size, "0" * 64) for name, size in sizes.items()}
    sizes[MANIFEST] = len(Manifest(**{**vars(draft), "files": files}).encode())
    return sizes
