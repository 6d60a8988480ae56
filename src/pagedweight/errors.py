"""The two exception families of the project: what the user must fix, and what passes.

Nothing else is caught on purpose. A `UserError` ends a command with exit code 2 and one message
that names the thing, the numbers and the way out. A `Transient` is counted and survived.
"""

from __future__ import annotations

from collections.abc import Iterable


class PagedWeightError(Exception):
    """Base of every exception that the project raises on purpose."""


class UserError(PagedWeightError):
    """Something the user can fix: a file, a flag, a budget. The command exits with code 2."""


class CheckpointError(UserError):
    """A checkpoint (source or quantized) that is missing something, damaged or not supported."""


class Transient(PagedWeightError):
    """A failure that the service survives: degrade, count it, go on (for example a failed map)."""


def listing(items: Iterable[object], limit: int = 8) -> str:
    """Join offenders for a message: all of them up to `limit`, then how many more there are."""
    names = [str(item) for item in items]
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
