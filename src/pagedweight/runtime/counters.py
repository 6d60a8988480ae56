"""Running totals of one rank, for metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Everything since the start; rows, bytes, pages, granules and events by name."""

    rows_lowered: int = 0
    rows_raised: int = 0
    uploaded_bytes: int = 0
    compacted_bytes: int = 0
    reclaimed_pages: int = 0
    granules_grown: int = 0
    granules_shrunk: int = 0
    rolled_back: int = 0
    """Refusals of the device or the pool after which everything was as before."""
    aborted_batches: int = 0
    stale_copies: int = 0
    """Copies that came in for a batch given up in the meantime."""

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))
