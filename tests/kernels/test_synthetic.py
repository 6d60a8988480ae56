"""The torch packing equals the checkpoint's; synthetic layers are what they say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.checkpoint.packing import pack, unpack
from pagedweight.core.geometry import BlockGeometry, LayerShape
from pagedweight.kernels.reference.bits import logical, pack_padded, unpack_padded
from pagedweight.kernels.synthetic import random_bits, random_layer, random_routing

blocks = st.builds(
    BlockGeometry,
    segments=st.integers(1, 2),
    segment_rows=st.integers(1, 40),
    cols=st.integers(1, 150),
)


@settings(deadline=None, max_examples=40)
@given(blocks, st.integers(2, 8), st.integers(0, 2**31))
def test_torch_packing_is_the_checkpoint_packing(block, planes, seed):
    gen = torch.Generator().manual_seed(seed)
    size = (block.padded_rows, block.padded_cols)
    codes = torch.randint(0, 1 << planes, size, dtype=torch.uint8, generator=gen)
    words = pack_padded(codes, block, planes)
    assert torch.equal(unpack_padded(words, block), codes)
    raw = words.numpy().view(np.uint32)
    assert np.array_equal(unpack(raw, block), logical(codes, block).numpy())
    clean = torch.from_numpy(unpack(pack(logical(codes, block).numpy(), block, planes), block))
    assert torch.equal(clean, logical(codes, block))


def test_without_poison_the_words_are_the_checkpoint_words():
    shape = LayerShape(experts=2, hidden=70, intermediate=19)
    layer = random_layer(shape, torch.full((2, 2), 3), planes=3, poison=False)
    for kind, block in enumerate(shape.blocks):
        words = layer.planes[kind].numpy().view(np.uint32)
        assert np.array_equal(pack(unpack(words, block), block, 3), words)


def test_poison_fills_every_padding_and_every_unread_plane():
    shape = LayerShape(experts=2, hidden=70, intermediate=19)
    bits = torch.tensor([[2, 5], [6, 3]])
    layer = random_layer(shape, bits, planes=6)
    for kind, block in enumerate(shape.blocks):
        codes = unpack_padded(layer.planes[kind][:, 0], block)
        assert codes[:, block.cols :].any()
        for expert in range(2):
            table, q = layer.tables[expert][kind], int(bits[expert, kind])
            padding = table.shape[0] - block.rows
            assert int(table.isnan().all(1).sum()) == padding > 0
            unread = layer.table.planes[expert, kind, q:]
            assert (unread == layer.garbage[kind].data_ptr()).all()
        assert layer.dense(kind).isfinite().all()


def test_bits_beyond_the_planes_are_refused():
    shape = LayerShape(experts=1, hidden=64, intermediate=16)
    with pytest.raises(ValueError, match="of 4 planes"):
        random_layer(shape, torch.tensor([[5, 3]]), planes=4)


@pytest.mark.parametrize("routing", ["uniform", "zipf", "hot"])
def test_routing_is_distinct_and_normalized(routing):
    weights, ids = random_routing(300, 12, 4, routing)
    assert ids.min() >= 0
    assert ids.max() < 12
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    assert torch.allclose(weights.sum(1), torch.ones(300))
    counts = torch.bincount(ids.flatten().long(), minlength=12)
    if routing == "hot":
        assert counts[0] == 300
    if routing == "zipf":
        assert counts[0] > 2 * counts[11]


def test_random_bits_cover_the_range():
    bits = random_bits(200, torch.Generator().manual_seed(1), 2, 6)
    assert set(bits.unique().tolist()) == {2, 3, 4, 5, 6}
