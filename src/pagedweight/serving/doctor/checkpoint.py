"""A quantized checkpoint: whole, and small enough for this machine's memory, and its GPU's."""

from __future__ import annotations

from pathlib import Path

import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import KINDS
from pagedweight.core.size_table import SizeTable
from pagedweight.errors import UserError
from pagedweight.memory.limits import available_bytes
from pagedweight.serving.doctor.finding import Finding


def checkpoint(out: Path) -> Finding:
    """Structure of `out` (not its checksums), and its experts beside the memory that is there."""
    try:
        opened = Checkpoint.open(out)
    except UserError as error:
        return Finding("checkpoint", "wrong", str(error), "quantize again, or copy it again")
    sizes = SizeTable.of(opened.shape, opened.bits)
    experts = len(opened.moe_layers) * opened.shape.experts
    least, most = (experts * int(sizes.resident[:, level].sum()) for level in (0, -1))
    host = experts * (sizes.planes * sum(sizes.plane_bytes) + int(sizes.table_bytes.sum()))
    left, gpu = available_bytes(), _gpu_bytes()
    values = {
        "experts_bytes": most,
        "experts_bytes_lowest": least,
        "host_bytes": host,
        "available_bytes": left,
        "gpu_bytes": gpu,
    }
    said = (
        f"{opened.manifest.architecture}, {experts * len(KINDS):,} linear blocks, experts "
        f"{least:,} bytes at {opened.bits[0]} bits and {most:,} at {opened.bits[-1]}, "
        f"all levels {host:,} bytes"
    )
    way_out = _way_out(least, most, host, left, gpu)
    return Finding("checkpoint", "note" if way_out else "ok", said, way_out, values)


def _gpu_bytes() -> int | None:
    """Memory of the first GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def _way_out(least: int, most: int, host: int, left: int, gpu: int | None) -> str:
    """What this machine is too small for, and what goes all the same; empty when nothing is."""
    if gpu is None:
        if most <= left:
            return ""
        return f"{left:,} bytes of memory are left: on a CPU serve at fewer bits (--bits)"
    if least > gpu:
        return f"a GPU has {gpu:,} bytes: cut the experts over several (--tensor-parallel-size)"
    if host > left:
        return (
            f"{left:,} bytes of memory are left, and --memory pins all levels there: serve at "
            "fixed bits (--bits, --plan), or with --pageable"
        )
    return ""
