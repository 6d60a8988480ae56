"""All of a GPU's memory to experts and KV: the sums, and what is refused (no GPU needed)."""

import json

import pytest

from pagedweight.errors import UserError
from pagedweight.memory.host import SMALL_PAGE
from pagedweight.serving import launch
from pagedweight.serving.elastic import backend
from pagedweight.serving.elastic.control import dispatch_config
from pagedweight.serving.elastic.gpu_budget import memory_within, utilization
from pagedweight.serving.options import ServeOptions

GIB = 1 << 30
LEVELS = (2, 3, 4, 5, 6)


@pytest.fixture(scope="module")
def config(request):
    path = request.config.rootpath / "models" / "tiny-moe" / "config.json"
    return json.loads(path.read_text())


def test_what_is_left_is_the_total_less_other_weights_and_reserve(config):
    alone = memory_within(config, LEVELS, 4 * GIB, GIB)
    assert 3 * GIB - 10_000_000 < alone < 3 * GIB
    halved = memory_within(config, LEVELS, 4 * GIB, GIB, ranks=2)
    tables = 76 * config["num_hidden_layers"] * config["num_experts"] * 2
    plain = 3 * GIB - alone - tables
    assert halved - alone == plain // 2
    assert memory_within(config, LEVELS, 5 * GIB, GIB) == alone + GIB
    by_share = memory_within(config, LEVELS, 4 * GIB, None)
    assert by_share == alone + GIB - int(4 * GIB * 0.08)


def test_a_total_that_other_weights_fill_is_refused_with_the_numbers(config):
    with pytest.raises(UserError, match=r"--gpu-memory 2000000 leaves nothing .* take \d+ bytes"):
        memory_within(config, LEVELS, 2_000_000, 0)


@pytest.mark.parametrize(
    "arguments, share",
    [
        ([], 0.92),
        (["--gpu-memory-utilization", "0.5"], 0.5),
        (["--max-model-len", "7", "--gpu_memory_utilization=0.25"], 0.25),
    ],
)
def test_vllms_own_flag_is_read(arguments, share):
    assert utilization(arguments) == share


@pytest.mark.parametrize("value", ["much", "0", "1.5", ""])
def test_a_share_that_is_none_is_refused(value):
    with pytest.raises(UserError, match="not a share between 0 and 1"):
        utilization([f"--gpu-memory-utilization={value}"])


@pytest.mark.parametrize(
    "gib, mib", [(1, 2), (2.9, 2), (3, 4), (6, 8), (11.9, 8), (12, 16), (24, 16), (120, 16)]
)
def test_pages_of_a_gpu_grow_with_the_budget(monkeypatch, gib, mib):
    assert backend.default_page_bytes(int(gib * GIB)) == SMALL_PAGE
    monkeypatch.setattr(backend, "on_gpu", lambda: True)
    assert backend.default_page_bytes(int(gib * GIB)) == mib << 20


def test_a_gpu_keeps_a_share_for_lowering_and_does_nothing_at_once(monkeypatch):
    from pagedweight.core.geometry import LayerShape
    from pagedweight.core.size_table import SizeTable
    from pagedweight.runtime.startup import reserve_pages

    sizes = SizeTable.of(LayerShape(60, 2048, 1408), LEVELS)
    small, large = backend.GPU_PAGE // 2, backend.GPU_PAGE
    assert backend.lowering_reserve(sizes, small, 1 << 20) == reserve_pages(sizes, small)
    assert backend.lowering_reserve(sizes, large, 12_800) == 200
    assert backend.lowering_reserve(sizes, large, 640) == reserve_pages(sizes, large) > 10
    assert dispatch_config(1, 7).at_once
    assert not dispatch_config(2, 7).at_once
    monkeypatch.setattr("pagedweight.serving.elastic.control.on_gpu", lambda: True)
    for ranks in (1, 2):
        found = dispatch_config(ranks, 7)
        assert (found.at_once, found.eager, found.lowering_pages) == (False, ranks == 1, 7)


def test_options_for_a_gpu_need_a_budget():
    for given, needs in (
        ({"host_memory": 1}, "--memory"),
        ({"pageable": True}, "--memory"),
        ({"gpu_reserve": 1}, "--gpu-memory"),
        ({"gpu_reserve": 1, "memory": GIB}, "--gpu-memory"),
    ):
        with pytest.raises(UserError, match=f"only means something together with {needs}"):
            ServeOptions(**given)
    assert ServeOptions(gpu_memory=GIB, gpu_reserve=1, pageable=True).budgeted


@pytest.mark.parametrize(
    "options, rest, share",
    [
        (ServeOptions(memory=14 * GIB), [], ["--gpu-memory-utilization", "0.1000"]),
        (
            ServeOptions(memory=9 * GIB, gpu_memory=70 * GIB),
            [],
            ["--gpu-memory-utilization", "0.5000"],
        ),
        (ServeOptions(memory=14 * GIB), ["--gpu-memory-utilization=0.3"], []),
        (ServeOptions(memory=200 * GIB), [], ["--gpu-memory-utilization", "1.0000"]),
    ],
)
def test_vllms_check_of_free_memory_is_of_this_budget(monkeypatch, options, rest, share):
    from types import SimpleNamespace

    found = SimpleNamespace(total_memory=140 * GIB)
    monkeypatch.setattr(launch, "on_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: found)
    assert launch._share(options, rest) == share
    monkeypatch.setattr(launch, "on_gpu", lambda: False)
    assert launch._share(options, rest) == []
