"""How many rows may come in: as many of each holding, in their order, as its pages hold."""

import numpy as np
import pytest

from pagedweight.core.geometry import LayerShape
from pagedweight.core.holdings import Holding, Holdings
from pagedweight.core.page_table import WeightPageTable
from pagedweight.core.size_class import SizeClassPages
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.runtime.room import Room

LEVELS = (2, 3, 4, 5, 6)
INDEX = BlockIndex(3, 8)
SIZES = SizeTable.of(LayerShape(8, 256, 192), LEVELS)
PAGE = 16 << 10


def holdings_of(count):
    experts = tuple(range(INDEX.experts))
    layers = np.array_split(np.arange(INDEX.layers), count)
    return Holdings(
        INDEX, [Holding(tuple(p.tolist()), experts, (n,)) for n, p in enumerate(layers)]
    )


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_as_many_rows_come_in_as_fit(count, seed):
    rng = np.random.default_rng(seed)
    table = WeightPageTable(INDEX, SIZES, rng.integers(2, 5, INDEX.rows).astype(np.int32))
    holdings = holdings_of(count)
    room = Room(table, SizeClassPages.of(SIZES, PAGE), holdings)
    rows = rng.permutation(INDEX.rows)[:40].astype(np.int64)
    table.set_desired(rows, table.committed_bits[rows] + rng.integers(1, 3, len(rows)))
    whole = room.to_raise(rows)
    for pages in (whole, whole // 2, whole // 5, np.zeros_like(whole), whole + 100):
        fitting = room.fitting_to_raise(rows, pages)
        assert (room.to_raise(fitting) <= pages).all()
        of = holdings.of_row[rows]
        for holding in range(count):
            mine = rows[of == holding]
            taken = fitting[holdings.of_row[fitting] == holding]
            assert taken.tolist() == mine[: len(taken)].tolist()
            if len(taken) < len(mine):
                assert room.to_raise(mine[: len(taken) + 1])[holding] > pages[holding]
