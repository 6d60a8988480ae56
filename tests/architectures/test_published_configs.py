"""A config.json alone says which layers have experts, how large they are and what KV takes."""

from __future__ import annotations

import json

import pytest
from published import PUBLISHED

from pagedweight.checkpoint.names import ARCHITECTURES, REFUSED, architecture_of
from pagedweight.core.geometry import LayerShape
from pagedweight.errors import CheckpointError


@pytest.mark.parametrize("model", PUBLISHED)
def test_experts_and_kv_of_a_published_model(model):
    published = PUBLISHED[model]
    facts = architecture_of(published.config).facts(published.config)
    assert len(facts.moe_layers) == published.moe_layers
    assert facts.moe_layers[-1] == facts.num_hidden_layers - 1
    weights = 3 * facts.shape.experts * facts.shape.hidden * facts.shape.intermediate
    found = len(facts.moe_layers) * weights / 1e9
    assert found == pytest.approx(published.expert_weights, abs=1e-3)
    assert sum(2 * layer.values() for layer in facts.kv) == published.kv_bytes


def test_every_row_of_the_table_has_a_published_model():
    rows = {architecture_of(published.config).name for published in PUBLISHED.values()}
    assert rows == {architecture.name for architecture in ARCHITECTURES}


def test_gemma_keeps_a_window_in_its_sliding_layers():
    config = PUBLISHED["gemma-4-26B-A4B"].config
    facts = architecture_of(config).facts(config)
    assert [layer.window for layer in facts.kv] == ([1024] * 5 + [None]) * 5
    assert facts.activation == "gelu_tanh"
    assert facts.tied


def test_heads_are_dealt_out_to_ranks_and_latent_kv_is_not():
    config = PUBLISHED["Mixtral-8x7B"].config
    layer = architecture_of(config).facts(config).kv[0]
    assert [layer.values(ranks) for ranks in (1, 2, 8, 16)] == [2048, 1024, 256, 256]
    config = PUBLISHED["DeepSeek-V3"].config
    layer = architecture_of(config).facts(config).kv[0]
    assert layer.values(1) == layer.values(8) == 576


def test_layers_that_only_predict_further_tokens_are_told_apart():
    config = PUBLISHED["DeepSeek-V3"].config
    facts = architecture_of(config).facts(config)
    assert facts.prediction_layers == (61,)
    assert 61 not in facts.moe_layers
    config = {**config, "moe_layer_freq": 2}
    assert architecture_of(config).facts(config).moe_layers == tuple(range(4, 61, 2))


@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("ranks", [2, 4])
def test_published_widths_can_be_cut_for_tensor_parallelism(model, ranks):
    config = PUBLISHED[model].config
    whole = architecture_of(config).facts(config).shape
    parts = [whole.part(rank, ranks) for rank in range(ranks)]
    assert sum(part.intermediate for part in parts) == whole.intermediate
    assert all(part == LayerShape(whole.experts, whole.hidden, part.intermediate) for part in parts)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refused_family_is_told_why_and_what_there_is(model_type):
    with pytest.raises(CheckpointError) as error:
        architecture_of({"model_type": model_type, "num_local_experts": 32})
    message = str(error.value)
    assert REFUSED[model_type] in message
    assert all(architecture.name in message for architecture in ARCHITECTURES)


def test_an_unknown_family_is_told_what_there_is():
    with pytest.raises(CheckpointError) as error:
        architecture_of({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}})
    message = str(error.value)
    assert "'dbrx' is not supported; supported are" in message
    assert all(architecture.name in message for architecture in ARCHITECTURES)


def test_a_dense_model_is_told_that_it_has_nothing_to_page():
    with pytest.raises(CheckpointError, match=r"dense model.*counts no experts.*qwen2_moe"):
        architecture_of({"model_type": "llama", "hidden_size": 4096})
    config = dict(PUBLISHED["gemma-4-26B-A4B"].config)
    config["text_config"] = {**config["text_config"], "enable_moe_block": False}
    with pytest.raises(CheckpointError, match=r"gemma4\): a dense model has nothing to page"):
        architecture_of(config).facts(config)


def test_a_config_that_lacks_a_number_is_told_which():
    config = {k: v for k, v in PUBLISHED["DeepSeek-V2"].config.items() if k != "n_routed_experts"}
    with pytest.raises(CheckpointError, match="n_routed_experts or num_experts"):
        architecture_of(config).facts(config)


@pytest.mark.parametrize("model_type", [*REFUSED, "llama", "dbrx"])
def test_quantize_refuses_with_exit_code_2_and_writes_nothing(model_type, tmp_path, capsys):
    from pagedweight.cli.main import main

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(SystemExit) as end:
        main(["quantize", str(source), "-o", str(tmp_path / "out")])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert model_type in said
    assert all(architecture.name in said for architecture in ARCHITECTURES)
    assert not (tmp_path / "out").exists()
