"""Choices that depend on shapes alone, without a GPU."""

import pytest

from pagedweight.core.geometry import LayerShape
from pagedweight.errors import UserError
from pagedweight.kernels.cuda.kernel import slices
from pagedweight.kernels.cuda.shapes import (
    PLAN,
    Build,
    Device,
    choose_build,
    choose_groups,
    is_prefill,
    most_pairs,
    plan_bytes,
    prefill_shared_bytes,
)

H200 = Device(0, (9, 0), 132, 232448)
A100 = Device(0, (8, 0), 108, 166912)
RTX = Device(0, (8, 9), 128, 101376)
QWEN, MIXTRAL = LayerShape(60, 2048, 1408), LayerShape(8, 4096, 14336)


@pytest.mark.parametrize("device, warps", [(H200, 16), (A100, 8), (RTX, 4)])
def test_as_many_warps_as_shared_memory_holds(device, warps):
    build = choose_build(device)
    assert build.warps == warps
    assert build.shared_bytes(1024 if device is H200 else 0) <= device.shared_limit


def test_too_little_shared_memory_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"need \d+ bytes .* has 49152"):
        choose_build(Device(0, (8, 0), 20, 49152))


def test_prefill_needs_a_large_thread_block():
    assert prefill_shared_bytes(H200) <= H200.shared_limit
    assert is_prefill(QWEN, 2048, 4, H200)
    assert not is_prefill(QWEN, 64, 4, H200)
    assert not is_prefill(QWEN, 2048, 4, A100)


@pytest.mark.parametrize("experts", [1, 8, 60, 128, 300, 512, 4000])
def test_a_launch_plans_what_fits(experts):
    most = most_pairs(experts)
    head = Build(16).head
    assert plan_bytes(most, experts) + head <= PLAN < plan_bytes(most + 1, experts) + head
    assert most >= 256


@pytest.mark.parametrize("wide", [False, True])
def test_slices_cover_every_token_once(wide):
    parts = slices(QWEN, 5000, 4, wide)
    assert [first for first, _ in parts] == [
        sum(n for _, n in parts[:i]) for i in range(len(parts))
    ]
    assert sum(n for _, n in parts) == 5000


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64])
def test_groups_are_whole_and_long_rows_have_them(tokens):
    for shape, top_k in ((QWEN, 4), (MIXTRAL, 2)):
        gate, down = choose_groups(shape, tokens, top_k, Build(16), 132)
        assert 0 <= gate <= down <= 3
    assert choose_groups(MIXTRAL, tokens, 2, Build(16), 132)[0] >= 1
