"""From all of a GPU's memory to the part that experts and KV share.

    |<-------------------------- --gpu-memory -------------------------->|
    | other weights | reserve: activations, graphs | experts and KV: --memory

The same sum as `inspect --config` does before anything is downloaded (`serving/forecast.py`), so
that what it promises is what is served. The worker then holds torch to what the pool leaves, and
prints what activations and graphs really took.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.errors import UserError
from pagedweight.serving.conflicts import number
from pagedweight.serving.forecast import Forecast, Question
from pagedweight.serving.options import ServeOptions

UTILIZATION = 0.92
"""vLLM 0.26's default of --gpu-memory-utilization."""


def within_gpu(
    checkpoint: Checkpoint, options: ServeOptions, arguments: Sequence[str]
) -> ServeOptions:
    """`options` with `memory` set; `arguments`: vLLM's own flags. Raises UserError with numbers."""
    if not torch.cuda.is_available():
        raise UserError("--gpu-memory is for a GPU, and there is none here: give --memory")
    if options.memory is not None:
        raise UserError("--gpu-memory and --memory exclude each other: give one of them")
    total = options.gpu_memory or share_of_gpu(arguments)
    config = json.loads((checkpoint.path / "config.json").read_text())
    ranks = number(arguments, "--tensor-parallel-size", "-tp")
    memory = memory_within(config, checkpoint.bits, total, options.gpu_reserve, ranks)
    return replace(options, gpu_memory=total, memory=memory)


def share_of_gpu(arguments: Sequence[str]) -> int:
    """Bytes that vLLM's utilization flag, or its default, allows on GPU 0."""
    return int(utilization(arguments) * torch.cuda.get_device_properties(0).total_memory)


def utilization(arguments: Sequence[str]) -> float:
    """vLLM's --gpu-memory-utilization as given, or its default; UserError when it is no share."""
    share: str | float = UTILIZATION
    for at, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        if name.replace("_", "-") == "--gpu-memory-utilization":
            share = value if given else next(iter(arguments[at + 1 : at + 2]), "")
    try:
        found = float(share)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise UserError(f"--gpu-memory-utilization is {share}, not a share between 0 and 1")
    return found


def memory_within(
    config: Mapping[str, Any],
    levels: Sequence[int],
    total: int,
    reserve: int | None,
    ranks: int = 1,
) -> int:
    """Bytes for experts and KV of one of `ranks` ranks with `total` bytes.

    Raises UserError when nothing is left.
    """
    found = Forecast.of(config, Question(budget=total, reserve=reserve, levels=tuple(levels)))
    plain = -(-found.plain.nbytes // ranks)
    left = total - found.reserve - plain - found.table_bytes
    if left <= 0:
        raise UserError(
            f"--gpu-memory {total} leaves nothing for experts and KV: weights that are no experts "
            f"take {plain} bytes on each rank and the reserve for activations, graphs and the "
            f"driver {found.reserve} (--gpu-reserve)"
        )
    return left
