"""Assignment: the bits that a policy wants for a piece of text, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.observation import BatchSignals
from pagedweight.core.planner.context import PlanContext
from pagedweight.core.size_table import SizeTable

Bits = NDArray[np.int8]
"""Bits by [MoE layer, expert, kind]: what a plan file holds."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """Bits of every linear block.

    bits:  int8 [L, E, 2]; with `high`, what the tokens of the smaller estimated error read.
    high:  int8 [L, E, 2], what the others read; None: all tokens read `bits`.
    share: part of the tokens that read `high`.
    """

    bits: Bits
    high: Bits | None = None
    share: float = 0.0

    def resident_bytes(self, sizes: SizeTable) -> int:
        """Bytes on the device: two levels at hand are the planes of the higher and both tables."""
        high = self.bits if self.high is None else self.high
        total = sizes.total(_flat(high))
        if self.high is not None:
            both = self.bits != self.high
            for kind in range(2):
                low = self.bits[:, :, kind][both[:, :, kind]].astype(np.int64) - sizes.lowest
                total += int(sizes.table_bytes[kind].take(low).sum())
        return total

    def read_bytes(self, sizes: SizeTable) -> float:
        """Bytes that a token reads on average if it met every block: what budgets count."""
        low = sizes.total(_flat(self.bits))
        if self.high is None:
            return float(low)
        return low + self.share * (sizes.total(_flat(self.high)) - low)

    def mean_bits(self, sizes: SizeTable) -> float:
        """Bits that a weight is read at, averaged over all weights of the routed experts."""
        planes = np.array(sizes.plane_bytes, np.float64)
        weigh = np.broadcast_to(planes, self.bits.shape)
        low = float(np.average(self.bits, weights=weigh))
        if self.high is None:
            return low
        return low + self.share * (float(np.average(self.high, weights=weigh)) - low)


def _flat(bits: Bits) -> NDArray[np.int32]:
    return bits.astype(np.int32).ravel()


def assignment_of(context: PlanContext, rows: NDArray[np.int32]) -> Assignment:
    """Bits int32 [rows] as an assignment."""
    return Assignment(rows.astype(np.int8).reshape(context.index.shape))


class PrecisionPolicy(Protocol):
    """Chooses bits within a budget of bytes, again before every piece of text."""

    def assign(self, signals: BatchSignals | None) -> Assignment:
        """Bits for what comes next. `signals`: of what was computed before it, None at first."""
        ...
