"""The table of a rank's GPU memory that is printed once serving is ready."""

from __future__ import annotations

from dataclasses import dataclass

from pagedweight.core.geometry import KINDS
from pagedweight.memory.pinned_tier import PinnedTier
from pagedweight.serving.elastic.store import ElasticStore


@dataclass(frozen=True)
class GpuUse:
    """Bytes outside the pool, measured: model: weights that are no experts; activations: their peak
    while profiling; graphs: what capture and warm-up took; left: what the driver reports free."""

    model: int
    activations: int
    graphs: int
    left: int


def memory_table(store: ElasticStore, use: GpuUse) -> str:
    """Lines of name, GiB and a remark."""
    budget, page = store.budget, store.budget.page_bytes
    granule = budget.granule_pages * page
    reachable = budget.reachable_blocks // budget.granule_blocks
    bits = [float(budget.bits[kind :: len(KINDS)].mean()) for kind in range(len(KINDS))]
    tier = store.worker.mover.weights.tier
    host = tier.nbytes if isinstance(tier, PinnedTier) else 0
    rows = [
        (
            "experts at start",
            budget.weight_pages * page,
            ", ".join(f"{name} {value:.2f} bits" for name, value in zip(KINDS, bits, strict=True)),
        ),
        ("experts at their floor", budget.floor_pages * page, ""),
        ("KV at start", budget.usable_granules * granule, _blocks(budget.usable_granules, store)),
        ("KV reachable", reachable * granule, _blocks(reachable, store)),
        ("reserve for lowering", budget.reserve * page, f"{budget.reserve} pages of {page} bytes"),
        ("pool: experts, KV, reserve", budget.pages * page, ""),
        ("weights that are no experts", use.model, ""),
        ("activations at their peak", use.activations, "of what the pool leaves"),
        ("graphs and warm-up", use.graphs, ""),
        ("still free on the GPU", use.left, ""),
        ("host tier", host, "pinned" if host else "in the checkpoint's files"),
    ]
    return "\n".join(
        f"  {name:<28}{size / (1 << 30):9.2f} GiB  {text}" for name, size, text in rows
    )


def _blocks(granules: int, store: ElasticStore) -> str:
    return f"{granules * store.budget.granule_blocks} blocks"
