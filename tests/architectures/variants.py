"""The same weights under every name that a family's table knows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from pagedweight.checkpoint.architecture import PREFIXES, Architecture
from pagedweight.checkpoint.source import SourceCheckpoint


@dataclass(frozen=True)
class Variant:
    """One way to store experts. `names`: (gate, up, down), or (gate_up, down) when fused; `suffix`
    follows them; `transposed`: 3-D tensors as [E, K, N]; `nested`: the text config inside another,
    as where the language model is part of a larger one."""

    prefix: str
    container: str
    names: tuple[str, ...]
    suffix: str
    transposed: bool = False
    nested: bool = False

    def __str__(self) -> str:
        layout = "t" if self.transposed else ""
        nested = "+nested" if self.nested else ""
        return (
            f"{self.prefix}N.{self.container}.{'/'.join(self.names)}{self.suffix}{layout}{nested}"
        )


def variants_of(architecture: Architecture) -> Iterator[Variant]:
    """All layouts below `model.`, then all prefixes with each layout's first names."""
    for container in architecture.containers:
        for names in architecture.projections:
            yield Variant("model.", container, names, ".weight")
        for names in architecture.fused:
            for suffix in ("", ".weight"):
                yield Variant("model.", container, names, suffix)
            yield Variant("model.", container, names, "", transposed=True)
    container = architecture.containers[-1]
    for prefix in PREFIXES:
        yield Variant(prefix, container, architecture.projections[0], ".weight", nested=True)
        yield Variant(prefix, container, architecture.fused[0], "", nested=True)


def write_variant(source: SourceCheckpoint, variant: Variant, folder: Path) -> Path:
    """`source` again in `folder`, its tensors named and laid out as `variant` says."""
    folder.mkdir()
    config = dict(source.config)
    if variant.nested:
        keep = {k: config[k] for k in ("model_type", "tie_word_embeddings") if k in config}
        if config["model_type"] == "gemma4_text":
            keep["model_type"] = "gemma4"
        config = {**keep, "text_config": config}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {_moved(name, variant.prefix): source.read(name) for name in source.plain_names()}
    for position, layer in enumerate(source.moe_layers):
        at = f"{variant.prefix}layers.{layer}.{variant.container}"
        for name, tensor in _experts(source, position, variant).items():
            tensors[f"{at}.{name}{variant.suffix}"] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _moved(name: str, prefix: str) -> str:
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


def _experts(source: SourceCheckpoint, position: int, variant: Variant) -> dict[str, torch.Tensor]:
    """Tensors of a layer by name below the container."""
    count = range(source.shape.experts)
    blocks = {
        kind: torch.stack([source.expert(position, expert, kind) for expert in count])
        for kind in ("gate_up", "down")
    }
    if len(variant.names) == 2:
        whole = zip(variant.names, blocks.values(), strict=True)
        return {n: (t.mT if variant.transposed else t).contiguous() for n, t in whole}
    gate, up = blocks["gate_up"].chunk(2, dim=1)
    parts = dict(zip(variant.names, (gate, up, blocks["down"]), strict=True))
    return {f"{e}.{n}": t[e].contiguous() for n, t in parts.items() for e in count}
