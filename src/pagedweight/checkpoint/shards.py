"""The weight files of a Hugging Face folder: all there, none damaged, none too many.

Cases this stops before a weight is read: a shard that the index lists and the folder lacks, a
truncated one, one that the index does not know, and tensors that index and shards disagree about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedweight.checkpoint.tensorfile import TensorFile
from pagedweight.errors import CheckpointError, listing

INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises CheckpointError naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def open_shards(folder: Path) -> dict[str, TensorFile]:
    """Every tensor of a folder and the file that holds it, in file order then offset order.

    Raises CheckpointError naming every offending file or tensor.
    """
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    # Some publishers add their own single-file copy beside the Hugging Face shards.
    present = [name for name in present if not name.startswith("consolidated")]
    if (folder / INDEX).exists():
        return _open_indexed(folder, present)
    if not present:
        raise CheckpointError(
            f"{folder} has no .safetensors file; convert the checkpoint to safetensors first"
        )
    if len(present) > 1:
        raise CheckpointError(
            f"{folder} has {len(present)} weight files and no {INDEX}: {listing(present)}"
        )
    return _tensors([TensorFile.open(folder / present[0])])


def _open_indexed(folder: Path, present: list[str]) -> dict[str, TensorFile]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} has no weight_map")
    listed = sorted(set(map(str, weight_map.values())))
    outside = [name for name in listed if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{INDEX} lists files outside the folder: {listing(outside)}")
    if missing := [name for name in listed if not (folder / name).is_file()]:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(listed)} files that {INDEX} lists: "
            f"{listing(missing)}; download them again"
        )
    if extra := [name for name in present if name not in listed]:
        raise CheckpointError(
            f"{folder} has weight files that {INDEX} does not list: {listing(extra)}; "
            f"remove them or use the index that belongs to them"
        )
    tensors = _tensors([TensorFile.open(folder / name) for name in listed])
    _check_index(weight_map, tensors)
    return tensors


def _check_index(weight_map: Mapping[str, str], tensors: Mapping[str, TensorFile]) -> None:
    """Index and shards must agree on which tensors there are and where."""
    absent = [f"{name} ({file})" for name, file in weight_map.items() if name not in tensors]
    if absent:
        raise CheckpointError(f"{INDEX} lists tensors that their files lack: {listing(absent)}")
    unlisted = [f"{n} ({f.path.name})" for n, f in tensors.items() if n not in weight_map]
    if unlisted:
        raise CheckpointError(f"weight files hold tensors that {INDEX} lacks: {listing(unlisted)}")
    moved = [n for n, f in tensors.items() if weight_map[n] != f.path.name]
    if moved:
        raise CheckpointError(f"{INDEX} names the wrong file for {listing(moved)}")


def _tensors(files: list[TensorFile]) -> dict[str, TensorFile]:
    tensors: dict[str, TensorFile] = {}
    for file in files:
        for name in sorted(file.tensors, key=lambda n: file.tensors[n].offset):
            if name in tensors:
                raise CheckpointError(
                    f"tensor {name} is in both {tensors[name].path.name} and {file.path.name}"
                )
            tensors[name] = file
    return tensors
