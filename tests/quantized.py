"""Quantized checkpoints with random codes and tables: right in form, quick to make, known inside.

For tests of whatever reads a checkpoint. The numbers have nothing to do with the source's weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from factory import make_checkpoint
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.checkpoint.writer import CheckpointWriter
from pagedweight.core.geometry import KINDS, LayerShape

METADATA = {"text": "none", "sequences": "0", "sequence_length": "0", "seed": "0"}


@dataclass(frozen=True)
class RandomLayer:
    """codes by kind: uint8 [E, N, K]; tables by kind and level: raw uint16 [E, N, 2^b]."""

    codes: dict[str, np.ndarray]
    tables: dict[str, dict[int, np.ndarray]]

    def weights(self, expert: int, kind: str, bits: int, dtype: torch.dtype) -> torch.Tensor:
        """What dequantizing must give, computed without planes: [N, K] of the table's `dtype`."""
        codes = self.codes[kind][expert] >> (max(self.tables[kind]) - bits)
        values = np.take_along_axis(self.tables[kind][bits][expert], codes.astype(int), axis=1)
        return torch.from_numpy(values.view(np.int16)).view(dtype)


def random_layer(
    shape: LayerShape, bits: Iterable[int], seed: int, dtype: torch.dtype = torch.bfloat16
) -> RandomLayer:
    """Codes and finite centroids from a seed."""
    rng, levels = np.random.default_rng(seed), tuple(bits)
    blocks = dict(zip(KINDS, shape.blocks, strict=True))
    codes = {
        kind: rng.integers(0, 1 << max(levels), (shape.experts, b.rows, b.cols), dtype=np.uint8)
        for kind, b in blocks.items()
    }
    tables = {
        kind: {
            level: torch.from_numpy(rng.normal(0, 0.05, (shape.experts, b.rows, 1 << level)))
            .to(dtype)
            .view(torch.int16)
            .numpy()
            .view(np.uint16)
            for level in levels
        }
        for kind, b in blocks.items()
    }
    return RandomLayer(codes, tables)


def flat_calibration(
    shape: LayerShape, layers: int, levels: int, unseen: Iterable[tuple[int, int]] = ()
) -> dict[str, np.ndarray]:
    """Even routing, unit moments; experts in `unseen` (layer position, expert) got no token."""
    tokens = np.full((layers, shape.experts), 10, np.int64)
    for pos, expert in unseen:
        tokens[pos, expert] = 0
    error = np.linspace(4, 1, levels, dtype=np.float32)
    return {
        "tokens": tokens,
        "mass": (tokens / tokens.sum(axis=1, keepdims=True)).astype(np.float32),
        "second_moment.gate_up": np.ones((layers, shape.experts, shape.hidden), np.float32),
        "second_moment.down": np.ones((layers, shape.experts, shape.intermediate), np.float32),
        "error": np.broadcast_to(error, (layers, shape.experts, 2, levels)).copy(),
    }


def make_quantized(
    path: Path,
    bits: Iterable[int] = range(2, 7),
    seed: int = 0,
    unseen: Iterable[tuple[int, int]] = (),
    **source: Any,
) -> tuple[Checkpoint, list[RandomLayer]]:
    """Write a source beside `path`, a quantized checkpoint into `path`, and open it."""
    model = make_checkpoint(path.with_name(path.name + "-source"), seed=seed, **source)
    opened = SourceCheckpoint.open(model)
    writer = CheckpointWriter(path, opened, bits)
    writer.copy_plain()
    dtype = getattr(torch, writer.table_dtype)
    layers = [
        random_layer(opened.shape, writer.bits, seed + pos, dtype)
        for pos in range(len(opened.moe_layers))
    ]
    for pos, layer in enumerate(layers):
        writer.write_layer(pos, layer.codes, layer.tables)
    calibration = flat_calibration(opened.shape, len(layers), len(writer.bits), unseen)
    writer.finish(calibration, METADATA)
    return Checkpoint.open(path), layers
