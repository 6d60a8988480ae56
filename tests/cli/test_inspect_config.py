"""`pagedweight inspect --config`: numbers from a config.json alone are those of the real thing."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import whole_configs
from pagedweight.checkpoint.architecture import KVLayer
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.checkpoint.summary import summarize
from pagedweight.checkpoint.tensorfile import TensorFile
from pagedweight.cli.main import main
from pagedweight.serving.elastic import backend
from pagedweight.serving.elastic.budget import KVBlock, divide, plan_context
from pagedweight.serving.forecast import Forecast, Question
from pagedweight.serving.options import ServeOptions

MIB, GIB = 1 << 20, 1 << 30


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in args])
    return int(end.value.code or 0)


def report_of(capsys, tmp_path, config, *args):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert run("inspect", "--config", path, "--json", *args) == 0
    return json.loads(capsys.readouterr().out)


def test_levels_and_host_bytes_are_those_of_the_quantized_folder(tiny_quantized, capsys):
    assert run("inspect", "--config", tiny_quantized / "config.json", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    checkpoint = Checkpoint.open(tiny_quantized)
    real = summarize(checkpoint)
    for mine, theirs in zip(found["levels"], real["levels"], strict=True):
        assert {name: mine[name] for name in theirs} == theirs
    for name in ("experts", "top_k", "hidden", "intermediate", "linear_blocks", "expert_weights"):
        assert found[name] == real[name]
    files = sorted((tiny_quantized / "experts").glob("layer-*.safetensors"))
    tensors = [t.entry.nbytes for f in files for t in TensorFile.open(f).tensors.values()]
    assert found["host_bytes"] == sum(tensors)
    assert found["notes"] == []


@pytest.mark.parametrize("model", ["tiny_moe", "lab_moe"])
def test_what_is_not_quantized_is_counted_to_the_byte(model, request, capsys):
    path = request.getfixturevalue(model)
    assert run("inspect", "--config", path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    source = SourceCheckpoint.open(path)
    assert found["plain_bytes"] == sum(source.nbytes(name) for name in source.plain_names())
    assert found["unquantized_expert_bytes"] == source.layer_bytes * len(source.moe_layers)
    assert sum(found["plain_groups"].values()) == found["plain_bytes"]


def test_lab_moe_is_what_was_measured_on_the_quantized_one(lab_moe, capsys):
    """Bytes of benchmarks/results/uniform_lab.json, which come from the quantized folder."""
    assert run("inspect", "--config", lab_moe, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    in_mb = {level["bits"]: round(level["bytes"] / 1e6, 1) for level in found["levels"]}
    assert in_mb == {2: 18.7, 3: 28.5, 4: 39.2, 5: 51.9, 6: 68.4}
    assert round(found["unquantized_expert_bytes"] / 1e6, 1) == 141.6


@pytest.mark.parametrize(
    ("config", "blocks", "planes", "down_bits", "block_mib"),
    [
        (whole_configs.QWEN15_MOE, 2880, (0.69, 0.34), (0.386, 0.523, 0.670, 0.841), 3.0),
        (whole_configs.MIXTRAL, 512, (14.0, 7.0), (0.376, 0.502, 0.629, 0.759), 2.0),
        (whole_configs.GEMMA4, 7680, (0.47, 0.24), (0.398, 0.545, 0.716, 0.932), 0.625),
    ],
    ids=["Qwen1.5-MoE", "Mixtral", "Gemma-4"],
)
def test_published_models(config, blocks, planes, down_bits, block_mib):
    """The table of the design: one plane in MiB, bytes per weight of down with its table; a KV
    block, which in Gemma belongs to five of thirty layers at a time."""
    found = Forecast.of(config, Question())
    sizes, shape = found.context.sizes, found.facts.shape
    assert found.context.index.rows == blocks
    assert tuple(round(n / MIB, 2) for n in sizes.plane_bytes) == planes
    weights = shape.hidden * shape.intermediate
    per_weight = [round(sizes.bytes_at(1, bits) / weights, 3) for bits in (3, 4, 5, 6)]
    assert per_weight == pytest.approx(down_bits, abs=0.0011)
    assert found.block.nbytes == block_mib * MIB


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (whole_configs.QWEN15_MOE, 14.3),
        (whole_configs.MIXTRAL, 46.7),
        (whole_configs.GEMMA4, 25.2),
        (whole_configs.DEEPSEEK_V2_LITE, 15.7),
    ],
    ids=["Qwen1.5-MoE", "Mixtral", "Gemma-4", "DeepSeek-V2-Lite"],
)
def test_parameters_are_as_many_as_published(config, billions):
    found = Forecast.of(config, Question())
    shape = found.facts.shape
    experts = len(found.facts.moe_layers) * shape.experts * 3 * shape.hidden * shape.intermediate
    assert (experts + found.plain.nbytes // 2) / 1e9 == pytest.approx(billions, abs=0.06)


def test_kv_by_kind_of_attention():
    latent = Forecast.of(whole_configs.DEEPSEEK_V2_LITE, Question())
    assert latent.token_bytes == 27 * (512 + 64) * 2
    assert latent.one_size
    sliding = Forecast.of(whole_configs.GEMMA4, Question())
    assert sliding.lasting_token_bytes == 5 * 2 * 2 * 512 * 2
    assert sliding.token_bytes == sliding.lasting_token_bytes + 25 * 2 * 8 * 256 * 2
    assert not sliding.one_size


def test_gemma_shares_its_blocks_and_wastes_nothing():
    """Five layers a group: one group of full layers with 32 tokens a block, five of sliding ones
    with 16, so that a block is 5 * 128 KiB whoever has it."""
    found = Forecast.of(whole_configs.GEMMA4, Question(budget=24 * GIB))
    assert found.can_be_elastic
    assert found.block == KVBlock(layers=5, layer_bytes=16 * 2 * 8 * 256 * 2)
    assert found.groups is not None
    assert sorted(found.groups.block_tokens) == [16] * 5 + [32]
    blocks = 32 * 100
    assert found.tokens(blocks + 1) == blocks * found.block.nbytes // found.token_bytes
    divided = found.elastic()
    assert divided is not None
    assert divided.reachable_blocks > divided.usable_granules * divided.granule_blocks
    held = divided.floor_pages + divided.reserve
    held += divided.reachable_blocks // divided.granule_blocks * divided.granule_pages
    assert 0 <= divided.pages - held < divided.granule_pages


def test_sizes_that_cannot_be_made_one_are_counted_together_and_told():
    found = Forecast.of(whole_configs.GEMMA4, Question(budget=24 * GIB))
    kv = (KVLayer(1, 512, None), KVLayer(2, 512, None))
    mixed = replace(found, facts=replace(found.facts, kv=kv))
    assert not mixed.can_be_elastic
    assert mixed.block == KVBlock(1, 16 * 3 * 512 * 2)
    assert mixed.tokens(11) == 160


def test_a_plan_for_gemma_says_how_to_serve_it(capsys, tmp_path):
    found = report_of(capsys, tmp_path, whole_configs.GEMMA4, "--plan", "--budget", "24GiB")
    assert found["plan"]["elastic"]
    assert found["plan"]["kv_tokens_reachable"] > found["plan"]["kv_tokens"] > 0
    assert found["kv"]["block_bytes"] == 5 * 128 * 1024
    assert sorted(found["kv"]["group_block_tokens"]) == [16] * 5 + [32]
    assert "not with --memory" not in " ".join(found["notes"])


def test_a_division_is_the_runtime_s_own(tiny_quantized):
    config = json.loads((tiny_quantized / "config.json").read_text())
    found = Forecast.of(config, Question(budget=60 * MIB, reserve=8 * MIB))
    options = ServeOptions(memory=found.memory, page_bytes=2 * MIB, bits=4)
    context = plan_context(Checkpoint.open(tiny_quantized), options, 1)
    real = divide(context, options, found.block, np.full(context.index.rows, 4, np.int32))
    mine = found.at(4)
    assert mine is not None
    for name in ("pages", "weight_pages", "usable_granules", "granule_blocks", "reachable_blocks"):
        assert getattr(mine, name) == getattr(real, name)
    # What an engine on this model reports of itself: 32 tokens of 4 layers, 2 heads of 64, twice.
    assert Forecast.of(config, Question(block_tokens=32)).block.nbytes == 65536


def test_pages_are_as_large_as_a_gpu_takes_them(monkeypatch):
    """Larger pages round more away."""
    monkeypatch.setattr(backend, "on_gpu", lambda: True)
    sizes, held = [], []
    for budget in (4, 8, 12, 24):
        found = Forecast.of(whole_configs.GEMMA4, Question(budget=budget * GIB, reserve=GIB // 8))
        assert backend.default_page_bytes(found.memory) == found.page_bytes
        sizes.append(found.page_bytes // MIB)
        held.append(found.held(4))
    assert sizes == [2, 4, 8, 16]
    assert held == sorted(held)
    assert Forecast.of(whole_configs.GEMMA4, Question(page_bytes=MIB)).page_bytes == MIB


@pytest.mark.parametrize("reserve", [None, 2 * GIB])
def test_the_least_budget_is_enough_and_hardly_more_than_enough(reserve):
    for bits in (2, 6):
        least = Forecast.of(whole_configs.MIXTRAL, Question(GIB, reserve)).least_budget(bits)
        assert Forecast.of(whole_configs.MIXTRAL, Question(least, reserve)).at(bits) is not None
        below = Question(least - 40 * MIB, reserve)  # two pages and the reserve for them
        assert Forecast.of(whole_configs.MIXTRAL, below).at(bits) is None


def test_a_plan_mixes_two_neighbouring_levels(capsys, tmp_path):
    found = report_of(capsys, tmp_path, whole_configs.MIXTRAL, "--plan", "--budget", "24GiB")
    plan, levels = found["plan"], {level["bits"]: level for level in found["levels"]}
    assert [levels[bits]["fits"] for bits in (2, 3, 4, 5, 6)] == [True, True, False, False, False]
    assert sorted(plan["blocks_at"]) == ["3", "4"]
    assert sum(plan["blocks_at"].values()) == 512
    assert 3 < plan["mean_bits"] < 4
    assert plan["held_bytes"] < found["budget"]["memory_bytes"]
    assert plan["kv_tokens"] < levels[3]["kv_tokens"] < plan["kv_tokens_reachable"]
    parts = ("reserve_bytes", "memory_bytes")
    total = sum(found["budget"][part] for part in parts) + found["plain_bytes"]
    total += found["kernel_table_bytes"]
    assert 0 <= 24 * GIB - total < found["budget"]["page_bytes"] == 16 * MIB


def test_a_budget_that_is_too_small_is_answered_not_an_error(capsys, tmp_path):
    found = report_of(capsys, tmp_path, whole_configs.MIXTRAL, "--plan", "--budget", "12GiB")
    assert found["plan"] == {"fits": False, "least_budget": found["levels"][0]["least_budget"]}
    path = tmp_path / "config.json"
    assert run("inspect", "--config", path, "--plan", "--budget", "12GiB") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit in 12.00 GiB; at least 15.01 GiB are needed" in shown


def test_tables_for_people(capsys, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole_configs.GEMMA4))
    assert run("inspect", "--config", path, "--bits", 4, "--budget", "24GiB") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("7,680 linear blocks", "beyond the sliding windows", "KV of several sizes"):
        assert words in shown
    assert "plan:" not in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--plan",), "--plan chooses bits for a budget: give --budget"),
        (("--plan", "--bits", 4, "--budget", "1GiB"), "--plan and --bits exclude each other"),
        (("--bits", 7), "--bits 7 is not one of the levels 2, 3, 4, 5, 6"),
        (("--budget", "much"), "'much' is not a size"),
        (("--budget", "0"), "--budget 0: give the device's memory"),
        (("--budget", "-1GiB"), "a size is 0 to"),
        (("--verify",), "--config does not go with OUT and --verify"),
    ],
)
def test_bad_flags_are_one_sentence(capsys, tmp_path, args, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole_configs.MIXTRAL))
    _refused(capsys, message, "--config", path, *args)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"torch_dtype": "int3"}, "dtype 'int3'"),
        ({"hidden_act": "relu6"}, "'relu6' is not supported"),
        ({"num_experts_per_tok": 99}, "99 experts for a token, of 8"),
        ({"layer_types": ["full_attention"]}, "does not name all 32 layers"),
        ({"num_key_value_heads": 0}, "transformers cannot build this config.json"),
        ({"quantization_config": "fp8"}, 'quantization_config is "fp8", not an object'),
        ({"quantization_config": {"quant_method": "pagedweight"}}, "has bits null, not levels"),
        (
            {"quantization_config": {"quant_method": "pagedweight", "bits": [6, 2]}},
            "has bits [6, 2], not levels",
        ),
    ],
)
def test_bad_configs_are_one_sentence(capsys, tmp_path, change, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**whole_configs.MIXTRAL, **change}))
    _refused(capsys, message, "--config", path)


def test_without_anything_to_inspect(capsys, tmp_path):
    _refused(capsys, "nothing to inspect")
    _refused(capsys, "go with --config", tmp_path, "--plan")
    _refused(capsys, "is missing", "--config", tmp_path / "config.json")


def test_a_quantized_source_is_said(capsys, tmp_path):
    config = {**whole_configs.MIXTRAL, "quantization_config": {"quant_method": "fp8"}}
    assert "quantized already (fp8)" in report_of(capsys, tmp_path, config)["notes"][0]


def _refused(capsys, message, *args):
    assert run("inspect", *args) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
