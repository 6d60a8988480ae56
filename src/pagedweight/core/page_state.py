"""The two small vocabularies of the page table: where a page is, what a row is doing."""

from __future__ import annotations

from enum import IntEnum


class PageState(IntEnum):
    """Where a page (or a lookup table) is. Ordered: along a row's planes it never rises."""

    HOST = 0
    IN_TRANSFER = 1
    DEVICE = 2


class Moving(IntEnum):
    """The transition that a row is in the middle of; at most one."""

    NONE = 0
    LOWERING = 1
    RELOADING = 2
    RETIRING = 3
