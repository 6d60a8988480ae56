"""KV granules as the scheduler sees them: which may be handed out, which come, which go.

    PARKED --wish--> GROWING --backed on every rank--> USABLE <---needed---+
       ^                |                                |                 |
       +--- heard ---SHRINKING <--- no block in use -----+----------- DRAINING

Blocks of a granule that is neither USABLE nor DRAINING are outside the scheduler's free queue. Of a
DRAINING one nobody is handed a block, while those who have some keep them: a block that is freed
leaves circulation, and with the last one the granule shrinks. It keeps its memory until then, so
that it is there again at once when KV is short. Low numbers are wished for first.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Protocol

import numpy as np

from pagedweight.runtime.messages import WorkerReport


class GranuleState(IntEnum):
    """See the module."""

    PARKED = 0
    GROWING = 1
    USABLE = 2
    SHRINKING = 3
    DRAINING = 4


class BlockParking(Protocol):
    """The engine's block pool, as the serving layer offers it."""

    def unpark(self, granule: int) -> None:
        """The granule has memory: its blocks may be handed out."""
        ...

    def in_use(self, granule: int) -> int:
        """Blocks of a granule that requests hold."""
        ...

    def is_empty(self, granule: int) -> bool:
        """Whether that is none; cheaper where it is not."""
        ...

    def drain(self, granule: int) -> int:
        """Take those blocks of a granule that are free out of circulation; how many are still in
        use. With none the granule is parked. May be called again and again."""
        ...

    def refill(self, granule: int) -> None:
        """Put back what `drain` took."""
        ...

    @property
    def held_back(self) -> int:
        """Free blocks with memory that nobody is handed: those of granules that drain."""
        ...


class GranuleLedger:
    """`granule_blocks` blocks a granule, `total_blocks` in all; block 0 is the null block.

    Granule 0 is never given back.
    """

    def __init__(self, total_blocks: int, granule_blocks: int, usable: Iterable[int] = ()) -> None:
        count = -(-total_blocks // granule_blocks)
        self.granule_blocks = granule_blocks
        self.total_blocks = total_blocks
        self.states = np.full(count, GranuleState.PARKED, np.uint8)
        self.states[list(usable)] = GranuleState.USABLE
        self._since = np.zeros(count, np.int64)
        self._last_grown = 0
        # Asked for many times a step, and mostly 0.
        self._tally = np.bincount(self.states, minlength=len(GranuleState)).tolist()

    def count(self, state: GranuleState) -> int:
        return self._tally[state]

    def having(self, state: GranuleState) -> list[int]:
        """Granules in `state`, ascending."""
        return np.flatnonzero(self.states == state).tolist() if self._tally[state] else []

    @property
    def in_transit(self) -> bool:
        """Whether the ranks have not answered for some granule yet."""
        return bool(self.count(GranuleState.GROWING) or self.count(GranuleState.SHRINKING))

    def stalled(self, step: int) -> int:
        """Steps since a granule that is wished for last came, or was first wished for."""
        growing = self.states == GranuleState.GROWING
        if not growing.any():
            return 0
        return step - max(self._last_grown, int(self._since[growing].min()))

    @property
    def usable_blocks(self) -> int:
        """Blocks that have memory on every rank and are in circulation or drain, without the null
        block; the last granule may be short."""
        usable = (self.states == GranuleState.USABLE) | (self.states == GranuleState.DRAINING)
        beyond_last = len(usable) * self.granule_blocks - self.total_blocks
        blocks = int(np.count_nonzero(usable)) * self.granule_blocks
        return blocks - int(usable[0]) - int(usable[-1]) * beyond_last

    def wish(self, count: int, step: int) -> tuple[int, ...]:
        """Want `count` more granules in all; the ranks are asked again until they have them."""
        more = count - self.count(GranuleState.GROWING)
        if more > 0:
            for granule in self.having(GranuleState.PARKED)[:more]:
                self._set(granule, GranuleState.GROWING, step)
        return tuple(self.having(GranuleState.GROWING)[:count])

    def keep(self, count: int, step: int) -> None:
        """Give up wishes beyond the lowest `count`; ranks that already back them take them back."""
        for granule in self.having(GranuleState.GROWING)[count:]:
            self._set(granule, GranuleState.SHRINKING, step)

    def give_back(self, count: int, parking: BlockParking, step: int) -> int:
        """Let up to `count` usable granules go: those with the fewest blocks in use, then the
        highest. One with none in use shrinks at once, others drain. Returns how many there were."""
        if count <= 0:
            return 0
        chosen = sorted(self._may_go(), key=lambda granule: (parking.in_use(granule), -granule))[
            :count
        ]
        for granule in chosen:
            self._set(granule, GranuleState.DRAINING, step)
            self._drain(granule, parking, step)
        return len(chosen)

    def follow(self, parking: BlockParking, step: int) -> None:
        """Granules that drain: what was freed leaves circulation, empty ones shrink. Where requests
        hold on to those that drain, others that have become empty go in their place."""
        for granule in self.having(GranuleState.DRAINING):
            self._drain(granule, parking, step)
        held = self.having(GranuleState.DRAINING)
        if not held:
            return
        empty = sum(parking.is_empty(granule) for granule in self._may_go())
        stay = sorted(held, key=parking.in_use, reverse=True)[:empty]
        for granule in stay:
            self._refill(granule, parking, step)
        self.give_back(len(stay), parking, step)

    def _may_go(self) -> list[int]:
        """Usable granules that KV may give back: all but the first."""
        return [granule for granule in self.having(GranuleState.USABLE) if granule]

    def _drain(self, granule: int, parking: BlockParking, step: int) -> None:
        if not parking.drain(granule):
            self._set(granule, GranuleState.SHRINKING, step)

    def refill(self, parking: BlockParking, step: int) -> None:
        """KV is short: no granule drains any longer, and all their blocks may be handed out."""
        for granule in self.having(GranuleState.DRAINING):
            self._refill(granule, parking, step)

    def _refill(self, granule: int, parking: BlockParking, step: int) -> None:
        parking.refill(granule)
        self._set(granule, GranuleState.USABLE, step)

    def hear(self, report: WorkerReport, parking: BlockParking) -> None:
        """Granules that all ranks back are unparked; those given back are parked for good."""
        answered = self._since <= report.step
        for granule in self.having(GranuleState.GROWING):
            if answered[granule] and report.backed >> granule & 1:
                self._set(granule, GranuleState.USABLE, report.step)
                self._last_grown = report.step
                parking.unpark(granule)
        for granule in self.having(GranuleState.SHRINKING):
            if answered[granule]:
                self._set(granule, GranuleState.PARKED, report.step)

    def _set(self, granule: int, state: GranuleState, step: int) -> None:
        self._tally[self.states[granule]] -= 1
        self._tally[state] += 1
        self.states[granule] = state
        self._since[granule] = step
