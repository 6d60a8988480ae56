"""Packing is a bijection, nested, and places each bit where the format says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.checkpoint.packing import pack, unpack
from pagedweight.core.geometry import BlockGeometry

blocks = st.builds(
    BlockGeometry,
    segments=st.integers(1, 2),
    segment_rows=st.integers(1, 40),
    cols=st.integers(1, 150),
)


@given(blocks, st.integers(2, 8), st.data())
def test_prefix_of_planes_is_the_lower_code(block, planes, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    codes = rng.integers(0, 1 << planes, (2, block.rows, block.cols), dtype=np.uint8)
    words = pack(codes, block, planes)
    assert words.nbytes == planes * 2 * block.plane_bytes
    for bits in range(1, planes + 1):
        assert np.array_equal(unpack(words[:bits], block), codes >> (planes - bits))


def test_bit_order_of_a_word_is_the_documented_one():
    block = BlockGeometry(segments=1, segment_rows=16, cols=64)
    for g, t, h, n, c, s in [(0, 0, 0, 0, 0, 0), (7, 3, 1, 1, 1, 3), (2, 1, 0, 1, 0, 2)]:
        codes = np.zeros((16, 64), np.uint8)
        codes[g + 8 * h, 16 * t + 8 * n + 2 * s + c] = 1
        words = pack(codes, block, 1)[0, 0, 0]
        assert words[4 * g + t] == 1 << (16 * h + 8 * n + 4 * c + s)
        assert np.count_nonzero(words) == 1


def test_up_rows_start_on_a_tile_of_their_own():
    block = BlockGeometry(segments=2, segment_rows=3, cols=5)
    codes = np.zeros((6, 5), np.uint8)
    codes[3:] = 1  # the up rows
    words = pack(codes, block, 1)
    assert not words[0, 0].any()
    assert words[0, 1].any()


def test_a_code_too_large_is_refused():
    block = BlockGeometry(segments=1, segment_rows=1, cols=1)
    with pytest.raises(ValueError, match="does not fit in 2 bits"):
        pack(np.full((1, 1), 4, np.uint8), block, 2)
