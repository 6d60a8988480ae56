"""The ledger of KV granules: which blocks it counts."""

from hypothesis import given
from hypothesis import strategies as st

from pagedweight.runtime.granules import GranuleLedger


@given(st.integers(1, 9), st.integers(2, 60), st.data())
def test_usable_blocks_are_those_of_usable_granules_but_the_null_block(size, total, data):
    granules = -(-total // size)
    usable = data.draw(st.sets(st.integers(0, granules - 1)))
    blocks = [block for block in range(1, total) if block // size in usable]
    assert GranuleLedger(total, size, usable).usable_blocks == len(blocks)
