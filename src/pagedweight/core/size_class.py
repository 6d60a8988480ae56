"""Bytes in whole pages: what arenas of equal slots really hold and really give back.

A size class is the planes of a kind or the lookup tables of a kind and level (DESIGN decision 4);
each lies in one dense arena, so the pages that it holds follow from its number of slots alone.
With pages of one byte this is plain bytes: M_i^b summed over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.geometry import KINDS
from pagedweight.core.size_table import IntArray, SizeTable


@dataclass(frozen=True, eq=False)
class SlotCounts:
    """Slots taken in each arena.

    planes: int64 [kinds]; tables: int64 [kinds, levels].
    """

    planes: IntArray
    tables: IntArray

    @staticmethod
    def of_bits(sizes: SizeTable, bits: NDArray[np.int32]) -> SlotCounts:
        """Slots that settled rows at `bits` (int [rows], kinds alternating) take."""
        levels = len(sizes.levels)
        tables = np.stack(
            [
                np.bincount(bits[kind :: len(KINDS)] - sizes.lowest, minlength=levels)
                for kind in range(len(KINDS))
            ]
        )
        return SlotCounts(tables @ np.array(sizes.levels, np.int64), tables)

    def flat(self) -> IntArray:
        """Slots in the order of `SizeClassPages.slot_bytes`, int64 [classes]."""
        return np.concatenate([self.planes, self.tables.ravel()])


@dataclass(frozen=True, eq=False)
class SizeClassPages:
    """Slot sizes of every arena, and the page size that they are rounded up to.

    Classes in order: plane of gate_up, plane of down, then tables [kinds, levels] row by row.
    """

    slot_bytes: IntArray
    page_bytes: int
    levels: int

    @staticmethod
    def of(sizes: SizeTable, page_bytes: int = 1) -> SizeClassPages:
        """Arenas of a size table; `page_bytes` 1 counts bytes, 2 MiB counts device pages."""
        if page_bytes < 1:
            raise ValueError(f"a page of {page_bytes} bytes")
        slots = [np.array(sizes.plane_bytes, np.int64), sizes.table_bytes.ravel()]
        return SizeClassPages(np.concatenate(slots), page_bytes, len(sizes.levels))

    @property
    def slack(self) -> int:
        """Bytes by which pages held and bytes used can differ at most."""
        return (self.page_bytes - 1) * len(self.slot_bytes)

    def held(self, slots: IntArray) -> IntArray:
        """Bytes of whole pages that arenas with `slots` [..., classes] hold, int64 [...]."""
        pages = -(-slots * self.slot_bytes // self.page_bytes)
        out: IntArray = pages.sum(-1) * self.page_bytes
        return out

    def held_by(self, counts: SlotCounts) -> int:
        """Bytes of whole pages behind `counts`."""
        return int(self.held(counts.flat()))

    def returned(self, slots: int, slot_bytes: int, removed: int) -> int:
        """Bytes of whole pages that one arena of `slots` gives back when `removed` slots go."""
        if not 0 <= removed <= slots:
            raise ValueError(f"{removed} slots cannot leave an arena of {slots}")
        before = -(-slots * slot_bytes // self.page_bytes)
        after = -(-(slots - removed) * slot_bytes // self.page_bytes)
        return (before - after) * self.page_bytes

    def all_step_slots(self) -> IntArray:
        """Change of slots when one row goes down a step, int64 [steps * kinds, classes].

        Row step * kinds + kind: from level index step + 1 to step.
        """
        kinds = len(KINDS)
        change = np.zeros((self.levels - 1, kinds, len(self.slot_bytes)), np.int64)
        for step in range(self.levels - 1):
            for kind in range(kinds):
                first = kinds + kind * self.levels
                change[step, kind, kind] = -1
                change[step, kind, first + step] = 1
                change[step, kind, first + step + 1] = -1
        return change.reshape(-1, len(self.slot_bytes))
