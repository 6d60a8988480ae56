"""An unquantized checkpoint of a model's real shape with random weights, for offline benchmarks.

Weights have what quantizing has to cope with: rows of different scale and a few columns that stick
out; embeddings lie mostly in a few directions, so that inputs of experts are correlated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pagedweight.bench.synthetic import TYPES, plain_shards, plain_values
from pagedweight.checkpoint.layout import PLAIN_METADATA, Shard, index_json
from pagedweight.checkpoint.names import architecture_of
from pagedweight.checkpoint.shards import INDEX
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.checkpoint.tensorfile import Entry, write_tensors
from pagedweight.core.atomic_file import write_atomic
from pagedweight.core.geometry import LayerShape
from pagedweight.errors import UserError

WRITERS = 8
EXPERTS_A_FILE = 8
DIRECTIONS = 64
"""Directions that embeddings mostly lie in."""


def make_source(config: Mapping[str, Any], out: Path, device: str, seed: int) -> SourceCheckpoint:
    """Write a source of `config` (a whole config.json) into `out` and open it.

    Raises UserError when `out` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty folder; choose another or empty it")
    out.mkdir(parents=True, exist_ok=True)
    gen, dtype = torch.Generator(device).manual_seed(seed), str(config["dtype"])
    shards = [*plain_shards(config), *expert_shards(config)]
    with ThreadPoolExecutor(WRITERS) as pool:
        waiting = []
        for shard in shards:
            data = [_raw(entry, dtype, gen) for entry in shard.entries]
            args = (out / shard.name, shard.entries, data, PLAIN_METADATA)
            waiting.append(pool.submit(write_tensors, *args))
            if len(waiting) >= WRITERS:
                waiting.pop(0).result()
        for future in waiting:
            future.result()
    write_atomic(out / INDEX, [index_json(shards)])
    write_atomic(out / "config.json", [(json.dumps(config, indent=1) + "\n").encode()])
    return SourceCheckpoint.open(out)


def expert_shards(config: Mapping[str, Any]) -> Iterator[Shard]:
    """Routed experts as published, one tensor for each projection."""
    architecture, stored = architecture_of(config), TYPES[str(config["dtype"])]
    facts, (gate, up, down) = architecture.facts(config), architecture.projections[0]
    sizes = _sizes(facts.shape)
    for layer in facts.moe_layers:
        place = f"model.layers.{layer}.{architecture.containers[0]}"
        for first in range(0, facts.shape.experts, EXPERTS_A_FILE):
            experts = range(first, min(first + EXPERTS_A_FILE, facts.shape.experts))
            entries = [
                Entry(f"{place}.{expert}.{name}.weight", stored, size)
                for expert in experts
                for name, size in zip((gate, up, down), sizes, strict=True)
            ]
            yield Shard(f"experts-{layer:05d}-{first:05d}.safetensors", tuple(entries))


def _sizes(shape: LayerShape) -> tuple[tuple[int, int], ...]:
    inner, hidden = shape.intermediate, shape.hidden
    return ((inner, hidden), (inner, hidden), (hidden, inner))


def expert_values(size: tuple[int, ...], dtype: str, gen: torch.Generator) -> torch.Tensor:
    """[N, K] of about 1/sqrt(K): rows' scales spread by a quarter, one column in 200 three times as
    large."""
    values = torch.randn(size, generator=gen, device=gen.device) * size[1] ** -0.5
    values *= torch.randn((size[0], 1), generator=gen, device=gen.device).mul(0.25).exp()
    values[:, torch.rand(size[1], generator=gen, device=gen.device) < 1 / 200] *= 3
    return values.to(getattr(torch, dtype))


def embedding_values(size: tuple[int, ...], dtype: str, gen: torch.Generator) -> torch.Tensor:
    """[V, H] of about 1, nine tenths of the variance in DIRECTIONS directions."""
    given = {"generator": gen, "device": gen.device}
    few = torch.randn((DIRECTIONS, size[1]), **given) * (0.9 / DIRECTIONS) ** 0.5
    values = torch.randn((size[0], DIRECTIONS), **given) @ few
    values += torch.randn(size, **given) * 0.1**0.5
    return values.to(getattr(torch, dtype))


def _raw(entry: Entry, dtype: str, gen: torch.Generator) -> memoryview:
    if ".experts." in entry.name:
        values = expert_values(entry.shape, dtype, gen)
    elif "embed_tokens" in entry.name:
        values = embedding_values(entry.shape, dtype, gen)
    else:
        return memoryview(plain_values(entry, dtype, gen)).cast("B")
    return memoryview(values.view(torch.int16).cpu().numpy()).cast("B")
