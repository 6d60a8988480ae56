"""What a check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "wrong"]
"""note: something to know that stops nothing. wrong: something will not work."""


@dataclass(frozen=True)
class Finding:
    """said: one line. way_out: what to do about it, or empty. values: the numbers, for JSON."""

    name: str
    status: Status
    said: str
    way_out: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
