"""What launcher, scheduler and workers work out by themselves is what vLLM deals out."""

from __future__ import annotations

import numpy as np
import pytest
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.cli.main import main
from pagedweight.core.policy import Policy
from pagedweight.core.policy_file import save_policy
from pagedweight.errors import UserError
from pagedweight.serving.elastic.budget import KVBlock, divide_all, plan_context
from pagedweight.serving.elastic.dealing import Dealing, Parallel, _dealt
from pagedweight.serving.options import ServeOptions
from quantized import make_quantized

PAGE = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("dealing")
    make_quantized(path / "out")
    save_policy(Policy(offload_blocks=2, reload_blocks=6), path / "policy.json")
    return Checkpoint.open(path / "out")


@pytest.mark.parametrize("experts", [2, 7, 8, 60])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_experts_go_where_vllm_puts_them(experts, ranks):
    if experts < ranks:
        with pytest.raises(UserError, match=f"{experts} experts cannot be dealt out to {ranks}"):
            _dealt(experts, Parallel(ranks, 1, True), 0)
        return
    for rank, (mine, ranks_of_it) in enumerate(_dealt(experts, Parallel(ranks, 1, True), 4)):
        count, local, *_ = determine_expert_map(ranks, rank, experts)
        assert ranks_of_it == (4 + rank,)
        assert len(mine) == count
        assert [int(local[expert]) for expert in mine] == list(range(count))


def test_layers_go_where_vllm_puts_them(checkpoint, monkeypatch):
    layers = checkpoint.manifest.num_hidden_layers
    found = Dealing.of(checkpoint, Parallel(tensor=2, pipeline=2))
    bounds = [get_pp_indices(layers, stage, 2) for stage in range(2)]
    assert found.depths == tuple(stop - start for start, stop in bounds)
    for part, (start, stop) in zip(found.holdings.parts, bounds, strict=True):
        decoders = [checkpoint.moe_layers[position] for position in part.layers]
        assert decoders == [layer for layer in checkpoint.moe_layers if start <= layer < stop]
    assert [part.ranks for part in found.holdings.parts] == [(0, 1), (2, 3)]
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1,1,1,1,1,1")
    with pytest.raises(UserError, match="VLLM_PP_LAYER_PARTITION"):
        Dealing.of(checkpoint, Parallel(pipeline=2))


def test_experts_in_stages_are_a_holding_each(checkpoint):
    found = Dealing.of(checkpoint, Parallel(tensor=2, pipeline=2, experts=True))
    assert [part.ranks for part in found.holdings.parts] == [(0,), (1,), (2,), (3,)]
    assert found.parallel.cuts == 1
    assert len(found.depths) == 4


def test_one_holding_is_what_one_rank_has(checkpoint):
    options = ServeOptions(memory=700_000, page_bytes=PAGE)
    context = plan_context(checkpoint, options, 1)
    assert Dealing.of(checkpoint, Parallel(tensor=1)).contexts(context) == (context,)
    assert Dealing.of(checkpoint, Parallel(tensor=2)).holdings.count == 1


def test_kv_has_as_many_blocks_on_every_rank(checkpoint):
    policy = str(checkpoint.path.parent / "policy.json")
    options = ServeOptions(memory=500_000, page_bytes=PAGE, policy=policy)
    context = plan_context(checkpoint, options, 1)
    for parallel in (Parallel(2, 1, True), Parallel(1, 2), Parallel(2, 2, True)):
        dealing = Dealing.of(checkpoint, parallel)
        contexts, blocks = dealing.contexts(context), dealing.blocks(KVBlock(3, 4096))
        free = [None] * dealing.holdings.count
        budgets = divide_all(contexts, options, blocks, free)
        assert len({budget.usable_granules for budget in budgets}) == 1
        assert len({budget.reachable_blocks for budget in budgets}) == 1
        assert all(budget.free_pages >= 0 for budget in budgets)
        assert any(budget.free_pages < budget.granule_pages for budget in budgets)
        fixed = dealing.rows_of(np.arange(context.index.rows, dtype=np.int32))
        assert sorted(np.concatenate(fixed).tolist()) == list(range(context.index.rows))


@pytest.mark.parametrize("flags", [("--bits", "4"), ("--memory", "24MiB")])
def test_a_width_with_fewer_tiles_than_ranks_is_refused(tiny_quantized, capsys, flags):
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tiny_quantized), *flags, "--print-command", "--", "-tp", "8"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "an expert width of 256 is 4 tiles of 64: it cannot be cut into 8 parts" in said
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tiny_quantized), *flags, "--print-command", "--", "-tp", "4"])
    assert not end.value.code
