"""Do all of several independent things, and only then say what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from pagedweight.errors import Transient

T = TypeVar("T")


def all_of(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Results of `calls`; raises the first Transient after every call was tried."""
    results: list[T] = []
    failure: Transient | None = None
    for call in calls:
        try:
            results.append(call())
        except Transient as error:
            failure = failure or error
    if failure:
        raise failure
    return results
