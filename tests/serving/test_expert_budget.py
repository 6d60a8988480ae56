"""Budgets as users write them."""

from __future__ import annotations

import pytest

from pagedweight.core.geometry import LayerShape
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.errors import UserError
from pagedweight.serving.expert_budget import parse_budget

INDEX = BlockIndex(2, 4)
SIZES = SizeTable.of(LayerShape(4, 128, 64), (2, 3, 4))


def whole(bits: int) -> int:
    return sum(SIZES.bytes_at(kind, bits) for kind in range(2)) * INDEX.rows // 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("3b", whole(3)),
        ("3 bits", whole(3)),
        ("2.5b", (whole(2) + whole(3)) // 2),
        ("28.5MB", 28_500_000),
        ("1 GiB", 1 << 30),
        ("123456", 123456),
    ],
)
def test_bits_are_the_bytes_of_uniform_bits_and_sizes_are_sizes(text, size):
    assert parse_budget(text, SIZES, INDEX) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5b", "stores 2 to 4 bits"),
        ("1.9b", "stores 2 to 4 bits"),
        ("b", "is not a size"),
        ("3 planes", "is not a size"),
    ],
)
def test_what_is_no_budget_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_budget(text, SIZES, INDEX)
