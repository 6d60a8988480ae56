"""Where KV blocks lie in vLLM 0.26 (an allocation a layer) and 0.32 (one), and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pagedweight.errors import UserError
from pagedweight.memory.host import HostDevice
from pagedweight.memory.kv_region import KVRegion
from pagedweight.memory.pool import PagePool
from pagedweight.serving.elastic.kv_layout import kv_layout
from pagedweight.serving.elastic.rank import KVOnRegion

PAGE, BLOCK, BLOCKS, LAYERS = 4096, 1024, 20, 3


def config_of(tensors, sizes=(BLOCK,) * LAYERS):
    groups = [
        SimpleNamespace(kv_cache_spec=SimpleNamespace(page_size_bytes=size), layer_names=[f"l{n}"])
        for n, size in enumerate(sizes)
    ]
    return SimpleNamespace(num_blocks=BLOCKS, kv_cache_tensors=tensors, kv_cache_groups=groups)


def of_0_26(**changes):
    whole = {"size": BLOCKS * BLOCK, "shared_by": ["l0"], "offset": 0, "block_stride": 0}
    return config_of([SimpleNamespace(**{**whole, **changes}) for _ in range(LAYERS)])


def of_0_32(stride=BLOCK):
    tensor = SimpleNamespace(
        size=LAYERS * BLOCKS * BLOCK,
        layers=["l0", "l1", "l2"],
        offset=0,
        layer_stride=BLOCKS * BLOCK,
        block_stride=stride,
    )
    return config_of([tensor])


def test_an_allocation_a_layer_begins_on_a_page():
    layout = kv_layout(of_0_26(), 4, PAGE)
    assert [start % PAGE for start, _ in layout.parts] == [0] * LAYERS
    assert [size for _, size in layout.parts] == [BLOCKS * BLOCK] * LAYERS
    assert len(layout.granules) == 5
    starts = [start for start, _ in layout.parts]
    assert layout.granules[1].extents == tuple((start + 4 * BLOCK, 4 * BLOCK) for start in starts)


@pytest.mark.parametrize("config", [of_0_26(), of_0_32()], ids=["0.26", "0.32"])
def test_allocations_are_answered_with_the_region_and_blocks_are_where_granules_say(config):
    layout = kv_layout(config, 4, PAGE)
    device = HostDevice(PAGE)
    pool = PagePool(device, 20)
    region = KVRegion(device, pool, layout.nbytes, layout.granules)
    region.grow([1, 3])
    whole = region.tensor()
    mode = KVOnRegion([whole[start : start + size] for start, size in layout.parts])
    sizes = [tensor.size for tensor in config.kv_cache_tensors]
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
        config_of(of_0_26().kv_cache_tensors, (BLOCK, BLOCK, 2 * BLOCK)),
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

    report = WorkerReport(3, free_pages=5)
    output = ReportedOutput(Late(), report).get_output()
    assert output.pagedweight is report
    assert output.req_ids == EMPTY_MODEL_RUNNER_OUTPUT.req_ids
    assert not hasattr(EMPTY_MODEL_RUNNER_OUTPUT, "pagedweight")
