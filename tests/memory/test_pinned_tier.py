"""The pinned host tier holds what the checkpoint's tier holds, and says what it takes."""

import ctypes

import numpy as np
import pytest

from pagedweight.core.geometry import LayerShape
from pagedweight.core.size_table import BlockIndex, SizeTable
from pagedweight.errors import UserError
from pagedweight.memory.host_tier import table_item
from pagedweight.memory.pinned_tier import PinnedTier, check_host_budget, tier_bytes

LEVELS = (3, 4, 5)


class Numbered:
    """Every byte tells whose it is; sources have gaps, as a tensor-parallel cut has."""

    def __init__(self):
        self.index = BlockIndex(2, 3)
        self.shape = LayerShape(3, 64, 40)
        self.sizes = SizeTable.of(self.shape, LEVELS)

    def _bytes(self, row, item, nbytes):
        rng = np.random.default_rng((row, item))
        return rng.integers(0, 256, (nbytes // 16, 3, 16), dtype=np.uint8)[:, 1]

    def plane(self, row, plane):
        return self._bytes(row, plane, self.sizes.plane_bytes[row % 2])

    def table(self, row, bits):
        nbytes = int(self.sizes.table_bytes[row % 2, bits - LEVELS[0]])
        return self._bytes(row, table_item(bits), nbytes)


def allocate(nbytes):
    return np.full(nbytes, 0xEE, np.uint8)


def test_every_piece_is_the_same_in_both_and_by_address():
    tier = Numbered()
    pinned = PinnedTier(tier, allocate)
    assert pinned.nbytes == tier_bytes(tier)
    rows, items, expected = [], [], []
    for row in range(tier.index.rows):
        for plane in range(LEVELS[-1]):
            expected.append(tier.plane(row, plane).reshape(-1))
            assert np.array_equal(pinned.plane(row, plane), expected[-1])
            rows, items = [*rows, row], [*items, plane]
        for bits in LEVELS:
            expected.append(tier.table(row, bits).reshape(-1))
            assert np.array_equal(pinned.table(row, bits), expected[-1])
            rows, items = [*rows, row], [*items, table_item(bits)]
    targets = np.arange(len(rows), dtype=np.int64)
    copies = pinned.copies(np.array(rows), np.array(items), targets)
    assert copies.nbytes.sum() == pinned.nbytes
    for copy, source, nbytes, wanted in zip(
        copies, copies.sources.tolist(), copies.nbytes.tolist(), expected, strict=True
    ):
        assert ctypes.string_at(source, nbytes) == wanted.tobytes()
        assert np.array_equal(copy.source, wanted)
    assert [copy.target for copy in copies] == targets.tolist()


def test_over_the_budget_is_refused_with_both_numbers_before_anything_is_allocated():
    need = tier_bytes(Numbered())
    with pytest.raises(UserError, match=rf"{need} bytes .* --host-memory allows {need - 1}: allow"):
        PinnedTier(Numbered(), lambda _: pytest.fail("allocated"), need - 1)
    with pytest.raises(UserError, match=r"needs 100 bytes .* may take 50: .*--pageable"):
        check_host_budget(100, None, 50)
