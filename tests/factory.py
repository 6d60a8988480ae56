"""Tiny Hugging Face MoE checkpoints with the names, shapes and configs of the published families.

`make_checkpoint` writes one that transformers loads; `fault` breaks it in one of the ways of
`faults.FAULTS`. Written with the safetensors package, so that our own reader is tested against it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from faults import FAULTS

VOCAB = 96
ARCHS = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "gemma4_text", "gemma4")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Spec:
    """What a tiny checkpoint is like. `dense`: decoder layers without routed experts."""

    arch: str
    layout: str
    layers: int
    dense: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tied: bool
    prefix: str
    container: str
    projections: tuple[str, str, str]
    transposed: bool

    @property
    def gemma(self) -> bool:
        return self.arch.startswith("gemma4")


def make_checkpoint(
    path: Path,
    arch: str = "qwen2_moe",
    layout: str = "per_expert",
    shards: int = 1,
    tied: bool = False,
    experts: int = 4,
    hidden: int = 64,
    intermediate: int = 48,
    layers: int = 3,
    dense: tuple[int, ...] = (),
    top_k: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    fault: str | None = None,
    prefix: str | None = None,
    container: str | None = None,
    transposed: bool = False,
) -> Path:
    """Write a checkpoint of random weights into `path` and return it.

    `layout`: "per_expert" or "fused". `prefix` and `container` replace the family's usual names.
    With `shards` > 1 the tensors are spread over that many files with an index.
    """
    spec = Spec(
        arch=arch,
        layout=layout,
        layers=layers,
        dense=dense,
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        intermediate=intermediate,
        tied=tied,
        prefix=prefix or ("model.language_model." if arch == "gemma4" else "model."),
        container=container or _container(arch, layout),
        projections=("w1", "w3", "w2") if arch == "mixtral" else _NAMES,
        transposed=transposed,
    )
    config, tensors = _config(spec, dtype), _tensors(spec, dtype, seed)
    change = FAULTS[fault] if fault else None
    if change and change.config:
        change.config(config)
    if change and change.tensors:
        change.tensors(tensors)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    (path / "generation_config.json").write_text('{"eos_token_id": 0}')
    (path / "tokenizer_config.json").write_text('{"note": "kept byte for byte: é"}')
    _save(path, tensors, shards)
    if change and change.folder:
        change.folder(path)
    return path


def make_faulty(path: Path, fault: str, **options: Any) -> Path:
    """`make_checkpoint` with a fault and the options that it needs."""
    return make_checkpoint(path, fault=fault, **{**dict(FAULTS[fault].needs), **options})


_NAMES = ("gate_proj", "up_proj", "down_proj")


def _container(arch: str, layout: str) -> str:
    if arch == "mixtral" and layout == "per_expert":
        return "block_sparse_moe.experts"
    return "experts" if arch.startswith("gemma4") else "mlp.experts"


def _config(spec: Spec, dtype: torch.dtype) -> dict[str, Any]:
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": spec.hidden // 2,
        "max_position_embeddings": 512,
        "num_experts_per_tok": spec.top_k,
        "tie_word_embeddings": spec.tied,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if spec.gemma:
        return _gemma_config(spec, common)
    names = {
        "qwen2_moe": "Qwen2Moe",
        "qwen3_moe": "Qwen3Moe",
        "mixtral": "Mixtral",
        "olmoe": "Olmoe",
    }
    key = "num_local_experts" if spec.arch == "mixtral" else "num_experts"
    config = {
        "architectures": [f"{names[spec.arch]}ForCausalLM"],
        "model_type": spec.arch,
        "hidden_act": "silu",
        **common,
        key: spec.experts,
    }
    if spec.arch.startswith("qwen"):
        config |= {
            "moe_intermediate_size": spec.intermediate,
            "shared_expert_intermediate_size": spec.intermediate,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(spec.dense),
            "norm_topk_prob": True,
        }
    return config


def _gemma_config(spec: Spec, common: dict[str, Any]) -> dict[str, Any]:
    common.pop("num_experts_per_tok")
    text = {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        **common,
        "enable_moe_block": True,
        "num_experts": spec.experts,
        "top_k_experts": spec.top_k,
        "moe_intermediate_size": spec.intermediate,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "global_head_dim": spec.hidden // 2,
        "num_global_key_value_heads": 1,
        "layer_types": ["sliding_attention"] * (spec.layers - 1) + ["full_attention"],
    }
    if spec.arch == "gemma4_text":
        return {"architectures": ["Gemma4ForCausalLM"], **text}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "tie_word_embeddings": spec.tied,
        "text_config": text,
        "vision_config": None,
        "audio_config": None,
        "dtype": common["dtype"],
    }


def _tensors(spec: Spec, dtype: torch.dtype, seed: int) -> Tensors:
    random = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        scale = shape[-1] ** -0.5
        return (torch.randn(shape, generator=random) * scale).to(dtype)

    tensors = {f"{spec.prefix}embed_tokens.weight": weight(VOCAB, spec.hidden)}
    for layer in range(spec.layers):
        at = f"{spec.prefix}layers.{layer}."
        tensors |= {at + name: value for name, value in _attention(spec, weight, dtype).items()}
        if layer in spec.dense:
            tensors |= {at + n: v for n, v in _dense("mlp", spec, weight).items()}
        else:
            tensors |= {at + n: v for n, v in _around_experts(spec, weight, dtype).items()}
            tensors |= {at + n: v for n, v in _experts(spec, weight).items()}
    tensors[f"{spec.prefix}norm.weight"] = torch.ones(spec.hidden, dtype=dtype)
    if not spec.tied:
        tensors["lm_head.weight"] = weight(VOCAB, spec.hidden)
    return tensors


def _attention(spec: Spec, weight: Any, dtype: torch.dtype) -> Tensors:
    head = spec.hidden // 2
    tensors = {
        "self_attn.q_proj.weight": weight(spec.hidden, spec.hidden),
        "self_attn.k_proj.weight": weight(head, spec.hidden),
        "self_attn.v_proj.weight": weight(head, spec.hidden),
        "self_attn.o_proj.weight": weight(spec.hidden, spec.hidden),
    }
    if spec.arch == "qwen2_moe":
        for name, width in (("q", spec.hidden), ("k", head), ("v", head)):
            tensors[f"self_attn.{name}_proj.bias"] = weight(width)
    elif spec.arch == "olmoe":
        tensors["self_attn.q_norm.weight"] = torch.ones(spec.hidden, dtype=dtype)
        tensors["self_attn.k_norm.weight"] = torch.ones(head, dtype=dtype)
    elif spec.arch != "mixtral":
        tensors["self_attn.q_norm.weight"] = torch.ones(head, dtype=dtype)
        tensors["self_attn.k_norm.weight"] = torch.ones(head, dtype=dtype)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.gemma:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return tensors | {f"{n}.weight": torch.ones(spec.hidden, dtype=dtype) for n in norms}


def _dense(module: str, spec: Spec, weight: Any) -> Tensors:
    return {
        f"{module}.gate_proj.weight": weight(spec.intermediate, spec.hidden),
        f"{module}.up_proj.weight": weight(spec.intermediate, spec.hidden),
        f"{module}.down_proj.weight": weight(spec.hidden, spec.intermediate),
    }


def _around_experts(spec: Spec, weight: Any, dtype: torch.dtype) -> Tensors:
    """Router, shared experts and norms of a MoE layer: all that must stay as it is."""
    router = weight(spec.experts, spec.hidden)
    if spec.gemma:
        norms = (
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
            "pre_feedforward_layernorm_2",
        )
        return {
            "layer_scalar": torch.ones(1, dtype=dtype),
            "router.proj.weight": router,
            "router.scale": torch.ones(spec.hidden, dtype=dtype),
            "router.per_expert_scale": torch.ones(spec.experts, dtype=dtype),
            **{f"{n}.weight": torch.ones(spec.hidden, dtype=dtype) for n in norms},
            **_dense("mlp", spec, weight),
        }
    tensors = {f"{spec.container.split('.')[0]}.gate.weight": router}
    if spec.arch == "qwen2_moe":
        tensors |= _dense("mlp.shared_expert", spec, weight)
        tensors["mlp.shared_expert_gate.weight"] = weight(1, spec.hidden)
    return tensors


def _experts(spec: Spec, weight: Any) -> Tensors:
    """The same numbers in either layout."""
    gate, up, down = spec.projections
    single: list[Tensors] = []
    for _ in range(spec.experts):
        single.append(
            {
                gate: weight(spec.intermediate, spec.hidden),
                up: weight(spec.intermediate, spec.hidden),
                down: weight(spec.hidden, spec.intermediate),
            }
        )
    if spec.layout == "per_expert":
        return {
            f"{spec.container}.{number}.{name}.weight": value
            for number, expert in enumerate(single)
            for name, value in expert.items()
        }
    gate_up = torch.stack([torch.cat([e[gate], e[up]]) for e in single])
    stacked = torch.stack([e[down] for e in single])
    if spec.transposed:
        gate_up, stacked = gate_up.transpose(1, 2), stacked.transpose(1, 2)
    return {
        f"{spec.container}.gate_up_proj": gate_up.contiguous(),
        f"{spec.container}.down_proj": stacked.contiguous(),
    }


def _save(path: Path, tensors: Tensors, shards: int) -> None:
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = list(tensors), {}
    for number in range(shards):
        part = names[len(names) * number // shards : len(names) * (number + 1) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        save_file({n: tensors[n] for n in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
