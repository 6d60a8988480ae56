"""A budget of routed experts' bytes as a user writes it: 28.5MB, or 2.5b for the bytes of uniform
2.5 bits."""

from __future__ import annotations

import re

import numpy as np

from pagedweight.core.geometry import KINDS
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.errors import UserError
from pagedweight.serving.options import parse_bytes

_BITS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*b(?:its?)?\s*")


def parse_budget(text: str, sizes: SizeTable, index: BlockIndex) -> int:
    """Bytes, tables included. NUMBERb: what all blocks take at that many bits, between two levels
    on a straight line; otherwise a size as for `--memory`. Raises UserError."""
    match = _BITS.fullmatch(text)
    if match is None:
        try:
            return parse_bytes(text)
        except UserError as error:
            raise UserError(f"a budget of {error}, or bits such as 3b") from None
    bits = float(match[1])
    if not sizes.lowest <= bits <= sizes.planes:
        raise UserError(
            f"a budget of {text}: the checkpoint stores {sizes.lowest} to {sizes.planes} bits"
        )
    return uniform_bytes(bits, sizes, index)


def uniform_bytes(bits: float, sizes: SizeTable, index: BlockIndex) -> int:
    """What all blocks take at `bits`, on a straight line between two levels; not below or above."""
    totals = sizes.resident.sum(axis=0) * (index.rows // len(KINDS))
    return int(np.interp(bits, sizes.levels, totals))
