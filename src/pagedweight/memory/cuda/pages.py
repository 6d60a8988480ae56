"""Physical pages and reserved addresses on one GPU: what is done at once.

    handles   [ 0 ][ 1 ][ 2 ][ 3 ] ...              cuMemCreate, once
    range     |[ 2 ][ 0 ]....[ 3 ]........|         cuMemMap one page each, one cuMemSetAccess a run
    tolerant  |[ 2 ][ 0 ][s][s][ 3 ][s][s]|         s: the one scratch page, mapped many times

Mapping does not wait for running kernels, and neither does unmapping: the caller fences
(`memory/interface.py`). One call unmaps a whole run of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedweight.errors import Transient, UserError
from pagedweight.memory.backing import runs
from pagedweight.memory.cuda.driver import check
from pagedweight.memory.interface import AddressRange, pages_of


class _Range:
    """mapped, scratch: bool [pages], which indices have a page of the pool or the scratch page."""

    def __init__(self, span: AddressRange, count: int, tolerant: bool) -> None:
        self.span = span
        self.tolerant = tolerant
        self.mapped = np.zeros(count, np.bool_)
        self.scratch = np.zeros(count, np.bool_)
        self.pages = np.full(count, -1, np.int64)


class CudaPages:
    """Pages of `page_bytes` on device `ordinal`, in the current context."""

    def __init__(self, driver: Any, ordinal: int, page_bytes: int | None = None) -> None:
        """`page_bytes` None: the driver's smallest. UserError when the driver has no such pages."""
        self.driver = driver
        self._properties = _properties(driver, ordinal)
        self._access = _access(driver, self._properties)
        smallest = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granule = int(
            check(
                driver.cuMemGetAllocationGranularity(self._properties, smallest),
                "the page size of the GPU",
            )
        )
        self.page_bytes = granule if page_bytes is None else page_bytes
        if self.page_bytes % granule or self.page_bytes & (self.page_bytes - 1):
            raise UserError(
                f"a page of {self.page_bytes} bytes is no power of two times this GPU's {granule}"
            )
        self._handles: list[Any] = []
        self._scratch: Any = None
        self._used = np.zeros(0, np.bool_)
        self._ranges: dict[str, _Range] = {}

    def free_and_total(self) -> tuple[int, int]:
        """Bytes that the driver reports free on the device, and all it has."""
        free, total = check(self.driver.cuMemGetInfo(), "free GPU memory")
        return int(free), int(total)

    def create(self, count: int) -> None:
        """Create `count` pages. UserError, with nothing created, when the GPU lacks them."""
        if self._handles:
            raise ValueError("the device's pages were created already")
        need, (free, total) = count * self.page_bytes, self.free_and_total()
        refusal = (
            f"the page pool needs {need} bytes of GPU memory ({count} pages of {self.page_bytes}) "
            f"and {free} of {total} are free"
        )
        if need > free:
            raise UserError(f"{refusal}: lower the memory budget, or stop what else uses the GPU")
        try:
            for _ in range(count):
                self._handles.append(self._create())
        except Transient as error:
            made = len(self._handles)
            self._release(self._handles)
            raise UserError(
                f"{refusal}, but the driver gave {made} pages ({error}): lower the budget"
            ) from error
        self._used = np.zeros(count, np.bool_)

    def reserve(self, nbytes: int, name: str, tolerant: bool) -> AddressRange:
        """Reserve addresses; a tolerant range has the scratch page behind every index."""
        if name in self._ranges:
            raise ValueError(f"a range named {name} exists already")
        count = pages_of(max(1, nbytes), self.page_bytes)
        size = count * self.page_bytes
        asked = self.driver.cuMemAddressReserve(size, self.page_bytes, 0, 0)
        try:
            base = int(check(asked, f"{name}: {size} bytes of GPU addresses"))
        except Transient as error:
            raise UserError(str(error)) from error
        found = _Range(AddressRange(base, size, name), count, tolerant)
        self._ranges[name] = found
        if tolerant:
            try:
                if self._scratch is None:
                    self._scratch = self._create()
                self._cover(found, 0, count)
            except Transient as error:
                raise UserError(f"{name}: the scratch page: {error}") from error
        return found.span

    def map(self, span: AddressRange, first: int, pages: Sequence[int]) -> None:
        """Put `pages` at first, first + 1, ...; all or none. Raises Transient or ValueError."""
        found, count = self._ranges[span.name], len(pages)
        self._require(found, first, count, mapped=False)
        chosen = np.fromiter(pages, np.int64, count)
        if count and not (chosen.min() >= 0 and chosen.max() < len(self._handles)):
            raise ValueError(f"{span.name}: physical pages that do not exist: {pages}")
        if self._used[chosen].any() or len(np.unique(chosen)) != count:
            raise ValueError(f"{span.name}: physical pages that are mapped already: {pages}")
        try:
            self._uncover(found, first, count)
            self._put(found, first, [self._handles[page] for page in chosen.tolist()])
        except Transient:
            self._mend(found)
            raise
        found.mapped[first : first + count] = True
        found.pages[first : first + count] = chosen
        self._used[chosen] = True

    def unmap(self, span: AddressRange, first: int, count: int) -> None:
        """Take the pages away from first .. first + count - 1; all or none."""
        found = self._ranges[span.name]
        self._require(found, first, count, mapped=True)
        self._unmap(found, first, count)
        part = slice(first, first + count)
        self._used[found.pages[part]] = False
        found.mapped[part] = False
        found.pages[part] = -1
        self._mend(found)

    def close(self) -> None:
        """Give back pages and addresses; nothing may use them."""
        for found in self._ranges.values():
            for first, count in runs(np.flatnonzero(found.mapped | found.scratch).tolist()):
                self._unmap(found, first, count)
            what = f"{found.span.name}: giving addresses back"
            check(self.driver.cuMemAddressFree(found.span.base, found.span.nbytes), what)
        self._ranges.clear()
        self._release(self._handles)
        if self._scratch is not None:
            self._release([self._scratch])
            self._scratch = None

    # -- inside ----------------------------------------------------------------------------------

    def _require(self, found: _Range, first: int, count: int, mapped: bool) -> None:
        part = found.mapped[first : first + count]
        if first < 0 or len(part) != count:
            raise ValueError(f"{found.span.name}: pages {first}..{first + count - 1} do not exist")
        if (part != mapped).any():
            state = "not mapped" if mapped else "mapped already"
            raise ValueError(f"{found.span.name}: pages at {first} are {state}")

    def _create(self) -> Any:
        what = f"a page of {self.page_bytes} bytes"
        return check(self.driver.cuMemCreate(self.page_bytes, self._properties, 0), what)

    def _release(self, handles: list[Any]) -> None:
        while handles:
            check(self.driver.cuMemRelease(handles.pop()), "giving a page back")

    def _put(self, found: _Range, first: int, handles: Sequence[Any]) -> None:
        """Map handles in a row and allow access; undone when it fails."""
        size, done = self.page_bytes, 0
        base = found.span.base + first * size
        name = f"{found.span.name}: page {first}"
        try:
            for handle in handles:
                check(
                    self.driver.cuMemMap(base + done * size, size, 0, handle, 0),
                    f"{name} + {done} of {len(handles)}: map",
                )
                done += 1
            if handles:
                check(
                    self.driver.cuMemSetAccess(base, done * size, [self._access], 1),
                    f"{name}: access to {len(handles)} pages",
                )
        except Transient:
            if done:
                self._unmap(found, first, done)
            raise

    def _unmap(self, found: _Range, first: int, count: int) -> None:
        base = found.span.base + first * self.page_bytes
        check(
            self.driver.cuMemUnmap(base, count * self.page_bytes),
            f"{found.span.name}: unmap {count} pages at {first}",
        )

    def _cover(self, found: _Range, first: int, count: int) -> None:
        """Put the scratch page behind indices that have nothing."""
        self._put(found, first, [self._scratch] * count)
        found.scratch[first : first + count] = True

    def _uncover(self, found: _Range, first: int, count: int) -> None:
        part = found.scratch[first : first + count]
        for start, length in runs(np.flatnonzero(part).tolist()):
            self._unmap(found, first + start, length)
            part[start : start + length] = False

    def _mend(self, found: _Range) -> None:
        """Cover what is bare in a tolerant range; where that is refused, strays fault until the
        next time."""
        if not found.tolerant:
            return
        bare = ~(found.mapped | found.scratch)
        for start, length in runs(np.flatnonzero(bare).tolist()):
            try:
                self._cover(found, start, length)
            except Transient:
                continue


def _properties(driver: Any, ordinal: int) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    return properties


def _access(driver: Any, properties: Any) -> Any:
    access = driver.CUmemAccessDesc()
    access.location.type = properties.location.type
    access.location.id = properties.location.id
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access
