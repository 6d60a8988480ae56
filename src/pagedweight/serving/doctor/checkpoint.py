"""A quantized checkpoint: whole, and small enough for this machine's memory."""

from __future__ import annotations

from pathlib import Path

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import KINDS
from pagedweight.core.size_table import SizeTable
from pagedweight.errors import UserError
from pagedweight.memory.limits import available_bytes
from pagedweight.serving.doctor.finding import Finding


def checkpoint(out: Path) -> Finding:
    """Structure of `out` (not its checksums), and its experts beside the memory that is left."""
    try:
        opened = Checkpoint.open(out)
    except UserError as error:
        return Finding("checkpoint", "wrong", str(error), "quantize again, or copy it again")
    sizes = SizeTable.of(opened.shape, opened.bits)
    experts = len(opened.moe_layers) * opened.shape.experts
    most = experts * int(sizes.resident[:, -1].sum())
    row = sizes.planes * sum(sizes.plane_bytes) + int(sizes.table_bytes.sum())
    left = available_bytes()
    values = {"experts_bytes": most, "host_bytes": experts * row, "available_bytes": left}
    said = (
        f"{opened.manifest.architecture}, {experts * len(KINDS):,} linear blocks, experts "
        f"{most:,} bytes at {opened.bits[-1]} bits, all levels {experts * row:,} bytes"
    )
    if most > left:
        way_out = f"{left:,} bytes of memory are left: on a CPU serve at fewer bits (--bits)"
        return Finding("checkpoint", "note", said, way_out, values)
    return Finding("checkpoint", "ok", said, values=values)
