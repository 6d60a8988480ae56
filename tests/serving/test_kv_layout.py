"""Where KV blocks lie in vLLM 0.26 (an allocation a place) and 0.32 (one), and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm_specs import specs_of, vllm_config

from pagedweight.errors import UserError
from pagedweight.memory.host import HostDevice
from pagedweight.memory.kv_region import KVRegion
from pagedweight.memory.pool import PagePool
from pagedweight.serving.elastic.budget import KVBlock
from pagedweight.serving.elastic.kv_layout import kv_block, kv_layout
from pagedweight.serving.elastic.rank import KVOnRegion

PAGE, BLOCK, BLOCKS, LAYERS = 4096, 1024, 20, 3


def config_of(tensors, groups=(("l0", "l1", "l2"),), sizes=(BLOCK,)):
    """`sizes`: of the layers' blocks, one for all groups or one for each."""
    groups = [
        SimpleNamespace(
            kv_cache_spec=SimpleNamespace(page_size_bytes=size), layer_names=list(names)
        )
        for names, size in zip(groups, sizes * (len(groups) // len(sizes)), strict=True)
    ]
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)


def of_0_26(**changes):
    whole = {"size": BLOCKS * BLOCK, "offset": 0, "block_stride": 0}
    return config_of(
        [SimpleNamespace(**{**whole, "shared_by": [f"l{n}"], **changes}) for n in range(LAYERS)]
    )


def of_0_32(stride=BLOCK):
    return config_of([tensor_of_0_32(["l0", "l1", "l2"], stride)])


def tensor_of_0_32(layers, stride=BLOCK, offset=0):
    return SimpleNamespace(
        size=LAYERS * BLOCKS * BLOCK,
        layers=layers,
        offset=offset,
        layer_stride=BLOCKS * BLOCK,
        block_stride=stride,
    )


HYBRID = (("f0", "f1", "f2"), ("s0", "s2", "s4"), ("s1", "s3"))
"""Three full and five sliding layers: groups of three, the last with one place unused."""


def hybrid_of_0_26():
    shared = [["f0", "s0", "s1"], ["f1", "s2", "s3"], ["f2", "s4"]]
    size = {"size": BLOCKS * BLOCK, "offset": 0, "block_stride": 0}
    return config_of([SimpleNamespace(**size, shared_by=names) for names in shared], HYBRID)


def hybrid_of_0_32():
    return config_of([tensor_of_0_32(list(names)) for names in HYBRID], HYBRID)


def test_an_allocation_a_layer_begins_on_a_page():
    layout = kv_layout(of_0_26(), 4, PAGE)
    assert [start % PAGE for start, _ in layout.parts] == [0] * LAYERS
    assert [size for _, size in layout.parts] == [BLOCKS * BLOCK] * LAYERS
    assert len(layout.granules) == 5
    starts = [start for start, _ in layout.parts]
    assert layout.granules[1].extents == tuple((start + 4 * BLOCK, 4 * BLOCK) for start in starts)


@pytest.mark.parametrize(
    ("hybrid", "plain"),
    [(hybrid_of_0_26(), of_0_26()), (hybrid_of_0_32(), of_0_32())],
    ids=["0.26", "0.32"],
)
def test_groups_of_layers_lie_over_each_other(hybrid, plain):
    """A block id is one group's at a time, so it takes what the largest group's layers take."""
    assert kv_block(hybrid.kv_cache_groups) == KVBlock(LAYERS, BLOCK)
    assert kv_layout(hybrid, 4, PAGE) == kv_layout(plain, 4, PAGE)


def test_the_block_is_the_one_that_vllm_divides_memory_by():
    """A Gemma-like model through vLLM's own grouping and planning."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

    config = vllm_config()
    for full, sliding, heads in ((1, 2, 1), (5, 25, 8), (4, 5, 2), (2, 3, 3)):
        groups = get_kv_cache_groups(config, specs_of(full, sliding, heads))
        block = kv_block(groups)
        found = get_kv_cache_config_from_groups(config, groups, 40 * block.nbytes + 1)
        assert found.num_blocks == 40
        layout = kv_layout(found, 4, PAGE)
        assert layout.nbytes == 40 * block.nbytes
        assert sum(granule.nbytes for granule in layout.granules) == layout.nbytes
        assert {len(granule.extents) for granule in layout.granules} == {block.layers}


def test_layers_of_one_type_with_blocks_of_two_sizes_are_refused_with_the_sizes():
    """What vLLM makes of such a model under --disable-hybrid-kv-cache-manager: one group."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    config = vllm_config(disable_hybrid_kv_cache_manager=True)
    groups = get_kv_cache_groups(config, specs_of(1, 2, 1))
    with pytest.raises(UserError, match=r"one size; this model has \[8192, 16384\] bytes"):
        kv_block(groups)


@pytest.mark.parametrize(
    "config",
    [of_0_26(), of_0_32(), hybrid_of_0_26(), hybrid_of_0_32()],
    ids=["0.26", "0.32", "0.26-hybrid", "0.32-hybrid"],
)
def test_allocations_are_answered_with_the_region_and_blocks_are_where_granules_say(config):
    layout = kv_layout(config, 4, PAGE)
    device = HostDevice(PAGE)
    pool = PagePool(device, 20)
    region = KVRegion(device, pool, layout.nbytes, layout.granules)
    region.grow([1, 3])
    whole = region.tensor()
    mode = KVOnRegion([whole[start : start + size] for start, size in layout.parts])
    one = hasattr(config.kv_cache_tensors[0], "layer_stride")
    sizes = [tensor.size for tensor in config.kv_cache_tensors][: 1 if one else LAYERS]
    with mode:
        other = torch.zeros(77, dtype=torch.int8)
        found = [torch.zeros(size, dtype=torch.int8, device="cpu") for size in sizes]
        torch.zeros(sizes[0])
    assert not mode.left
    assert other.numel() == 77
    layers = [layer for tensor in found for layer in tensor.view(-1, BLOCKS, BLOCK)]
    assert len(layers) == LAYERS
    for layer in layers:
        layer[4:8] = torch.arange(4, 8)[:, None]
    flat = whole.numpy()
    for start, nbytes in layout.granules[1].extents:
        expected = np.repeat(np.arange(4, 8, dtype=np.int8), BLOCK)
        assert np.array_equal(flat[start : start + nbytes], expected)
    assert all(layer[12:16].eq(0).all() for layer in layers)
    device.close()


@pytest.mark.parametrize(
    "config",
    [
        of_0_26(shared_by=["l0", "l1"]),
        of_0_26(block_stride=3 * BLOCK),
        of_0_26(size=7),
        of_0_32(stride=3 * BLOCK),
        config_of(of_0_26().kv_cache_tensors, (("l0", "l1"), ("l2",)), (BLOCK, 2 * BLOCK)),
        config_of(of_0_26().kv_cache_tensors, (("l0",), ("l1",), ("l2",))),
        config_of([tensor_of_0_32(["f0", "f1"]), tensor_of_0_32(["s0"], offset=64)], HYBRID[:2]),
        config_of(hybrid_of_0_26().kv_cache_tensors[:2], HYBRID),
    ],
)
def test_other_layouts_are_refused_in_words(config):
    with pytest.raises(UserError, match="elastic KV needs"):
        kv_layout(config, 4, PAGE)


def test_a_backend_whose_blocks_do_not_lie_next_to_each_other_is_refused():
    from pagedweight.serving.elastic.gpu_worker import check_blocks_adjacent

    heads_first = torch.zeros(BLOCKS, 4, 16, 8).bfloat16()
    check_blocks_adjacent(heads_first, BLOCKS, 1024)
    check_blocks_adjacent(heads_first.permute(0, 2, 1, 3), BLOCKS, 1024)
    check_blocks_adjacent(torch.zeros(2 * BLOCKS, 4, 8, 8).bfloat16(), BLOCKS, 1024)
    for wrong in (
        torch.zeros(2, BLOCKS, 4, 16, 4).bfloat16(),
        torch.zeros(3 * BLOCKS // 2, 4, 16, 8).bfloat16(),
        heads_first.float(),
    ):
        with pytest.raises(UserError, match="next to each other"):
            check_blocks_adjacent(wrong, BLOCKS, 1024)
    with pytest.raises(UserError, match="one KV tensor each"):
        check_blocks_adjacent([heads_first], BLOCKS, 1024)


def test_a_report_rides_on_an_output_that_is_still_being_copied():
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput

    from pagedweight.runtime.messages import WorkerReport
    from pagedweight.serving.elastic.rank import ReportedOutput

    class Late(AsyncModelRunnerOutput):
        def get_output(self):
            return EMPTY_MODEL_RUNNER_OUTPUT

    report = WorkerReport(3, backed=5)
    output = ReportedOutput(Late(), report).get_output()
    assert output.pagedweight is report
    assert output.req_ids == EMPTY_MODEL_RUNNER_OUTPUT.req_ids
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "pagedweight")
