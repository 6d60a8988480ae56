"""The KV cache's memory: granules that grow and shrink under fixed addresses (DESIGN decision 8).

A granule is P blocks over all layers. Where its bytes lie is the engine's business, so a granule is
a list of extents; a page that two granules share is backed while either is:

    page       0         1         2         3         4
          |    granule 0    |    granule 1    | granule 2   |     one layer, or all
    need       1         2         1         2         1         with granules 0, 1, 2 backed

New granules are zeroed in order before anyone may use them: garbage that reads as NaN would spoil
attention even where its weight is zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagedweight.errors import Transient, listing
from pagedweight.memory.backing import Backing
from pagedweight.memory.interface import POISON, Completion, Device
from pagedweight.memory.pool import PagePool

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Granule:
    """Byte extents (offset, length) of one granule inside the region, in any order."""

    extents: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(length for _, length in self.extents)


class KVRegion:
    """A reserved range of `nbytes` of which whole granules are backed by pool pages."""

    def __init__(
        self,
        device: Device,
        pool: PagePool,
        nbytes: int,
        granules: Sequence[Granule],
        name: str = "kv",
        tolerant: bool = True,
        poison: bool = False,
    ) -> None:
        """Nothing is backed yet. `tolerant`: stray accesses are survived (`Device.reserve`).

        Raises ValueError when extents overlap or leave the region.
        """
        self.nbytes = nbytes
        self.granules = tuple(granules)
        _check_extents(self.granules, nbytes)
        self.backing = Backing(device, pool, device.reserve(nbytes, name, tolerant))
        self._device = device
        self._page_bytes = pool.page_bytes
        self._poison = poison
        self._pages = [np.array(_pages(g, pool.page_bytes), np.int64) for g in self.granules]
        self._need = np.zeros(self.backing.span.nbytes // pool.page_bytes, np.int32)
        self._backed = np.zeros(len(self.granules), np.bool_)

    @property
    def backed(self) -> list[int]:
        """Granules that may be used, ascending."""
        return [int(g) for g in np.flatnonzero(self._backed)]

    @property
    def most_pages(self) -> int:
        """Pages under the largest granule."""
        return max((len(pages) for pages in self._pages), default=0)

    def is_backed(self, granule: int) -> bool:
        return bool(self._backed[granule])

    def pages_for(self, granules: Iterable[int]) -> int:
        """Pages that growing by `granules` would take from the pool now."""
        return self.backing.missing({p for g in granules for p in self._pages[g].tolist()})

    def grow(self, granules: Sequence[int]) -> None:
        """Back `granules` and zero them in order; all or none. Raises PoolShort or Transient."""
        self._require(granules, backed=False)
        self.backing.back(p for g in granules for p in self._pages[g].tolist())
        self._count(granules, +1)
        try:
            self._fill(granules, 0)
        except Transient:
            self._count(granules, -1)
            self._release(granules, self._device.fence())
            raise
        self._backed[list(granules)] = True

    def shrink(self, granules: Sequence[int]) -> None:
        """No step submitted from now on uses `granules`; their pages go when the others are done.

        With poison on, raises Transient after the granules are gone.
        """
        self._require(granules, backed=True)
        self._backed[list(granules)] = False
        self._count(granules, -1)
        try:
            if self._poison:
                self._fill(granules, POISON)
        finally:
            self._release(granules, self._device.fence())

    def reclaim(self, most: int | None = None) -> int:
        """Pages that went back to the pool. Raises Transient; what is left is tried again."""
        return self.backing.reclaim(most)

    def tensor(self) -> torch.Tensor:
        """int8 [nbytes] over the whole region, without touching it."""
        return self._device.tensor(self.backing.span.base, self.nbytes)

    # -- inside ----------------------------------------------------------------------------------

    def _require(self, granules: Sequence[int], backed: bool) -> None:
        wrong = [g for g in granules if self._backed[g] != backed]
        if wrong or len(set(granules)) != len(granules):
            state = "not backed" if backed else "backed already"
            raise ValueError(f"granules named twice or {state}: {listing(wrong)}")

    def _count(self, granules: Sequence[int], by: int) -> None:
        for granule in granules:
            self._need[self._pages[granule]] += by

    def _release(self, granules: Sequence[int], fence: Completion) -> None:
        pages = {p for g in granules for p in self._pages[g].tolist()}
        self.backing.release((p for p in sorted(pages) if not self._need[p]), fence)

    def _fill(self, granules: Sequence[int], byte: int) -> None:
        base = self.backing.span.base
        extents = [extent for granule in granules for extent in self.granules[granule].extents]
        for offset, length in _joined(sorted(extents)):
            self._device.fill(base + offset, length, byte)

    def check_integrity(self) -> None:
        """Raise AssertionError when granules, needs and mapped pages do not fit together."""
        self.backing.check_integrity()
        need = np.zeros_like(self._need)
        for granule in self.backed:
            need[self._pages[granule]] += 1
        if not np.array_equal(need, self._need):
            raise AssertionError("kv: pages are needed by granules that are not backed")
        lacking = [p for p in np.flatnonzero(need).tolist() if not self.backing.is_backed(p)]
        if lacking:
            raise AssertionError(f"kv: pages of backed granules not mapped: {listing(lacking)}")
        if self.backing.mapped != np.count_nonzero(need) + self.backing.surplus:
            raise AssertionError("kv: pages are mapped that no granule needs")


def _joined(extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Neighbouring extents of an ascending sequence made one."""
    start, end = -1, -1
    for offset, length in extents:
        if offset != end and end >= 0:
            yield start, end - start
        start = start if offset == end else offset
        end = offset + length
    if end >= 0:
        yield start, end - start


def _pages(granule: Granule, page_bytes: int) -> list[int]:
    pages: set[int] = set()
    for offset, length in granule.extents:
        pages.update(range(offset // page_bytes, -(-(offset + length) // page_bytes)))
    return sorted(pages)


def _check_extents(granules: Sequence[Granule], nbytes: int) -> None:
    end = 0
    for offset, length in sorted(extent for g in granules for extent in g.extents):
        if length < 1 or offset < end or offset + length > nbytes:
            raise ValueError(f"extent {offset}+{length} overlaps another or leaves {nbytes} bytes")
        end = offset + length


def strided_granules(
    blocks: int, per_granule: int, block_bytes: int, strides: Sequence[int]
) -> list[Granule]:
    """Granules of `per_granule` blocks when block b of part k lies at strides[k] + b * block_bytes.

    `strides` are the byte offsets at which each part (a layer, or the keys of a layer) begins; the
    last granule takes what is left over.
    """
    granules = []
    for first in range(0, blocks, per_granule):
        count = min(per_granule, blocks - first)
        extents = tuple((at + first * block_bytes, count * block_bytes) for at in strides)
        granules.append(Granule(extents))
    return granules
