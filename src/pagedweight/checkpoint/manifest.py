"""pagedweight.json and the quantization_config: what a folder says about itself.

The manifest is written last, so a folder that has one is whole. `docs/format.md` has the fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedweight.checkpoint.names import ACTIVATIONS
from pagedweight.checkpoint.shards import read_json
from pagedweight.core.geometry import MAX_BITS, MIN_BITS, LayerShape
from pagedweight.errors import CheckpointError, listing

FORMAT = "pagedweight"
FORMAT_VERSION = 1
MANIFEST = "pagedweight.json"
CALIBRATION = "experts/calibration.safetensors"
NEXT_MANIFEST = f"{MANIFEST}.new"
"""Beside the manifest while calibration is being replaced."""
PARTIAL = ".pagedweight-partial"
"""Folder inside an unfinished checkpoint: the options it was started with, measurements so far."""
TABLE_DTYPES = {"bfloat16": "BF16", "float16": "F16"}
"""Names in the manifest to safetensors types."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and sha256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The fields of pagedweight.json. `moe_layers`: decoder layer numbers, ascending."""

    architecture: str
    activation: str
    bits: tuple[int, ...]
    table_dtype: str
    shape: LayerShape
    top_k: int
    num_hidden_layers: int
    moe_layers: tuple[int, ...]
    source: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    unseen_experts: tuple[tuple[int, int], ...]

    def encode(self) -> bytes:
        """The file's bytes."""
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "architecture": self.architecture,
            "activation": self.activation,
            "bits": list(self.bits),
            "seed_bits": self.bits[0],
            "table_dtype": self.table_dtype,
            "experts": self.shape.experts,
            "hidden": self.shape.hidden,
            "intermediate": self.shape.intermediate,
            "top_k": self.top_k,
            "num_hidden_layers": self.num_hidden_layers,
            "moe_layers": list(self.moe_layers),
            "source": dict(self.source),
            "files": {n: {"bytes": f.bytes, "sha256": f.sha256} for n, f in self.files.items()},
            "unseen_experts": [list(pair) for pair in self.unseen_experts],
        }
        return (json.dumps(content, indent=1) + "\n").encode()

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read and check pagedweight.json; raises CheckpointError naming the field."""
        path = folder / MANIFEST
        if not path.is_file():
            if (folder / PARTIAL).is_dir():
                raise CheckpointError(
                    f"{folder} is unfinished: it has no {MANIFEST}; go on with the same "
                    f"`pagedweight quantize` command and --resume"
                )
            raise CheckpointError(f"{folder} is not a pagedweight checkpoint: no {MANIFEST}")
        content = read_json(path)
        check_version(path, content)
        try:
            manifest = _decode(content)
        except KeyError as error:
            raise CheckpointError(f"{path} has no field {error}") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path}: a field has the wrong form: {error}") from error
        manifest.check(path)
        return manifest

    def check(self, path: Path) -> None:
        """Raise CheckpointError listing every field whose value cannot be right."""
        faults = [f"bits: {problem}" for problem in bits_problems(self.bits)]
        if self.table_dtype not in TABLE_DTYPES:
            faults.append(f"table_dtype {self.table_dtype!r} is not one of {list(TABLE_DTYPES)}")
        if self.activation not in ACTIVATIONS.values():
            faults.append(f"activation {self.activation!r} is unknown")
        if min(self.shape.experts, self.shape.hidden, self.shape.intermediate) < 1:
            faults.append(f"empty experts: {self.shape}")
        if not 1 <= self.top_k <= self.shape.experts:
            faults.append(f"top_k {self.top_k} of {self.shape.experts} experts")
        ascending = list(self.moe_layers) == sorted(set(self.moe_layers))
        if not self.moe_layers or not ascending or self.moe_layers[0] < 0:
            faults.append(f"moe_layers {list(self.moe_layers)} are not ascending layer numbers")
        elif self.moe_layers[-1] >= self.num_hidden_layers:
            faults.append(f"moe layer {self.moe_layers[-1]} of {self.num_hidden_layers} layers")
        if outside := [n for n in self.files if Path(n).is_absolute() or ".." in Path(n).parts]:
            faults.append(f"files outside the folder: {listing(outside)}")
        wanted = [layer_file(layer) for layer in self.moe_layers] + [CALIBRATION, "config.json"]
        if absent := [name for name in wanted if name not in self.files]:
            faults.append(f"files does not list {listing(absent)}")
        if faults:
            raise CheckpointError(f"{path}: {'; '.join(faults)}")


def _decode(content: Mapping[str, Any]) -> Manifest:
    return Manifest(
        architecture=str(content["architecture"]),
        activation=str(content["activation"]),
        bits=tuple(int(b) for b in content["bits"]),
        table_dtype=str(content["table_dtype"]),
        shape=LayerShape(
            experts=int(content["experts"]),
            hidden=int(content["hidden"]),
            intermediate=int(content["intermediate"]),
        ),
        top_k=int(content["top_k"]),
        num_hidden_layers=int(content["num_hidden_layers"]),
        moe_layers=tuple(int(n) for n in content["moe_layers"]),
        source=dict(content["source"]),
        files={
            str(name): FileRecord(int(item["bytes"]), str(item["sha256"]))
            for name, item in content["files"].items()
        },
        unseen_experts=tuple((int(la), int(ex)) for la, ex in content["unseen_experts"]),
    )


def check_version(where: Path | str, content: Mapping[str, Any]) -> None:
    """Refuse a format other than this one, with both version numbers."""
    name = content.get("format", content.get("quant_method"))
    if name != FORMAT:
        raise CheckpointError(f"{where} describes the format {name!r}, not {FORMAT!r}")
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{where} has format version {version}; this pagedweight reads version "
            f"{FORMAT_VERSION}: use the pagedweight release that wrote it, or quantize again"
        )


def layer_file(layer: int) -> str:
    """Name, inside the folder, of the file of a decoder layer's experts."""
    return f"experts/layer-{layer:05d}.safetensors"


def bits_problems(bits: Sequence[int]) -> list[str]:
    """What is wrong with a choice of stored levels; empty when it can be used."""
    problems = []
    if not bits:
        return ["no level given"]
    if list(bits) != list(range(bits[0], bits[0] + len(bits))):
        problems.append(f"levels {list(bits)} are not ascending without gaps")
    if min(bits) < MIN_BITS or max(bits) > MAX_BITS:
        problems.append(f"levels {list(bits)} are not within {MIN_BITS} to {MAX_BITS}")
    return problems


def quantization_config(bits: Sequence[int], table_dtype: str) -> dict[str, Any]:
    """What config.json carries for vLLM to find the plugin by."""
    return {
        "quant_method": FORMAT,
        "format_version": FORMAT_VERSION,
        "bits": list(bits),
        "seed_bits": bits[0],
        "table_dtype": table_dtype,
    }
