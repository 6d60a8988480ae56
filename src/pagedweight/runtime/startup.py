"""Putting a rank together: pool, weights, page table, mover and worker, in the right order.

    budget  [ expert weights | KV granules | reserve ]        pages of one pool

The reserve is what lets bits fall when everything else is taken: the lower level's lookup tables
come in before anything leaves.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.size_table import SizeTable
from pagedweight.errors import UserError
from pagedweight.memory.host_tier import HostTier
from pagedweight.memory.interface import Device, pages_of
from pagedweight.memory.pool import PagePool
from pagedweight.runtime.mover import Mover
from pagedweight.runtime.weights import WeightMemory
from pagedweight.runtime.worker import MemoryWorker

RESERVED_ROWS = 32
"""Rows of each kind that can be lowered together when nothing else is free."""


def reserve_pages(sizes: SizeTable, page_bytes: int, rows: int = RESERVED_ROWS) -> int:
    """Pages to keep for lowering: tables of `rows` rows of each kind at their largest target (the
    top level is none), and the page that each table arena begins on.
    """
    tables = sizes.table_bytes[:, :-1]
    largest = tables.max(axis=1).tolist()
    return tables.size + sum(pages_of(rows * nbytes, page_bytes) for nbytes in largest)


def open_rank(
    device: Device,
    tier: HostTier,
    bits: NDArray[np.int32],
    budget_bytes: int,
    torch_device: torch.device | str = "cpu",
    poison: bool = False,
    reserve: int | None = None,
    pages_per_step: int | None = None,
    rank: int = 0,
    rows: NDArray[np.int64] | None = None,
) -> MemoryWorker:
    """Create the pool of a rank, load its experts at `bits` [rows]; KV is attached later.

    budget_bytes is for experts and KV together; `reserve`: pages of it to keep for lowering, None:
    as many as that needs; `pages_per_step`, `rank`, `rows`: see `MemoryWorker`. Set `worker.kv`
    once the KV layout is known.
    UserError with the numbers when the budget or the machine is too small.
    """
    if reserve is None:
        reserve = reserve_pages(tier.sizes, device.page_bytes)
    pages = budget_bytes // device.page_bytes
    if pages <= reserve:
        raise UserError(
            f"a memory budget of {budget_bytes} bytes is {pages} pages of {device.page_bytes}; "
            f"{reserve} of them are a reserve for changing precision: raise the budget"
        )
    weights = WeightMemory(
        device, PagePool(device, pages, reserve), tier, torch_device, poison=poison
    )
    weights.load(bits)
    mover = Mover(weights, WeightPageTable(tier.index, tier.sizes, bits))
    return MemoryWorker(mover, pages_per_step=pages_per_step, rank=rank, rows=rows)
