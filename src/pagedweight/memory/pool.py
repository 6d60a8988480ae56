"""The pool of physical pages: each belongs to one owner or is free (DESIGN decision 3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat

from pagedweight.errors import Transient, listing
from pagedweight.memory.interface import Device

FREE = ""


class PoolShort(Transient):
    """There are not enough free pages; nothing was taken."""


class PagePool:
    """All physical pages of a device, created once.

    `reserve` pages are kept for urgent takers: lowering precision frees memory, but first needs
    some for the lower level's lookup tables, so KV and reloads must not take the last pages.
    """

    def __init__(self, device: Device, pages: int, reserve: int = 0) -> None:
        """Create `pages` pages on `device`. UserError when the device does not have them."""
        if not 0 <= reserve <= pages:
            raise ValueError(f"a reserve of {reserve} in a pool of {pages} pages")
        device.create(pages)
        self.page_bytes = device.page_bytes
        self.reserve = reserve
        self._owner = [FREE] * pages
        self._free = list(range(pages - 1, -1, -1))

    @property
    def total(self) -> int:
        return len(self._owner)

    @property
    def free(self) -> int:
        """Pages that nobody holds, the reserve included."""
        return len(self._free)

    def can_take(self, urgent: bool = False) -> int:
        """Pages that a taker may have now."""
        return self.free if urgent else max(0, self.free - self.reserve)

    def take(self, count: int, owner: str, urgent: bool = False) -> list[int]:
        """`count` pages for `owner`, all or none. Raises PoolShort with the numbers."""
        if count > self.can_take(urgent):
            raise PoolShort(
                f"{owner} needs {count} pages of {self.page_bytes} bytes, {self.free} are free"
                + ("" if urgent else f" and {self.reserve} of them are a reserve")
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owner[page] = owner
        return pages

    def give(self, pages: Iterable[int], owner: str) -> None:
        """Put `pages` of `owner` back. ValueError when one is not theirs."""
        back = list(pages)
        wrong = [page for page in back if self._owner[page] != owner]
        if wrong:
            raise ValueError(f"{owner} gives back pages it does not hold: {listing(wrong)}")
        for page in back:
            self._owner[page] = FREE
        self._free.extend(back)

    def held_by(self, owner: str) -> int:
        """Pages that `owner` holds."""
        return self._owner.count(owner)

    def check_integrity(self, holders: Mapping[str, Iterable[int]] | None = None) -> None:
        """Raise AssertionError when a page is lost or held twice.

        `holders` is who says to hold what; when given, it must be exactly what the pool gave.
        """
        if len(set(self._free)) != len(self._free):
            raise AssertionError("pool: a page is free twice")
        free = {page for page, owner in enumerate(self._owner) if owner == FREE}
        if free != set(self._free):
            raise AssertionError(f"pool: the free list is off by {listing(free ^ set(self._free))}")
        if holders is None:
            return
        said = [pair for name, pages in holders.items() for pair in zip(pages, repeat(name))]
        gave = {(page, owner) for page, owner in enumerate(self._owner) if owner != FREE}
        if len(said) != len(set(said)) or set(said) != gave:
            raise AssertionError(f"pool: holders and pool differ: {listing(set(said) ^ gave)}")
