"""Which tensors are routed experts, by architecture: one table, read by everything.

Names and config keys are those of the published checkpoints and of the transformers classes of the
same model type. Every family is stored in one of two layouts: one tensor for each expert and
projection, or 3-D tensors that hold all experts of a layer (gate rows, then up rows).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pagedweight.errors import CheckpointError, listing

Part = Literal["gate", "up", "down", "gate_up"]

PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
"""What may stand before `layers.N.`: text-only models, and text models inside a larger one."""

NEVER = re.compile(
    r"(^|\.)(gate|router)(\.|$)|shared_expert|embed|lm_head|norm|attn|attention|vision|audio"
)
"""Never quantized, whatever else a table says: routers, shared experts, embeddings, heads, norms,
attention and towers for other inputs."""

LOOKS_LIKE_EXPERT = re.compile(r"(^|\.)experts\.")

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Config values to the contract's activations; gelu_new is the tanh formula written out."""


@dataclass(frozen=True)
class ExpertTensor:
    """What the name of an expert tensor says; `expert` is None when it holds all of a layer."""

    layer: int
    expert: int | None
    part: Part


@dataclass(frozen=True)
class Architecture:
    """One family: config keys (first one present counts) and names below `layers.N.`.

    `containers`: modules that hold the experts. `projections`: (gate, up, down) names of the
    per-expert layout, each followed by `.weight`. `fused`: (gate_up, down) names of the 3-D layout,
    with or without `.weight`. `tied`: embeddings are tied when the config does not say.
    """

    model_types: tuple[str, ...]
    containers: tuple[str, ...]
    projections: tuple[tuple[str, str, str], ...] = (("gate_proj", "up_proj", "down_proj"),)
    fused: tuple[str, str] = ("gate_up_proj", "down_proj")
    experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    hidden: tuple[str, ...] = ("hidden_size",)
    intermediate: tuple[str, ...] = ("moe_intermediate_size",)
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    activation: tuple[str, ...] = ("hidden_act",)
    enabled: str | None = None
    dense_layers: str | None = None
    first_dense_layers: str | None = None
    sparse_step: str | None = None
    tied: bool = field(default=False)

    @property
    def name(self) -> str:
        return self.model_types[0]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        prefixes = "|".join(re.escape(p) for p in PREFIXES)
        containers = "|".join(re.escape(c) for c in self.containers)
        single = "|".join(re.escape(n) for triple in self.projections for n in triple)
        fused = "|".join(re.escape(n) for n in self.fused)
        return re.compile(
            rf"(?:{prefixes})layers\.(?P<layer>\d+)\.(?:{containers})\."
            rf"(?:(?P<expert>\d+)\.(?P<single>{single})\.weight|(?P<fused>{fused})(?:\.weight)?)"
        )

    def parse(self, name: str) -> ExpertTensor | None:
        """What `name` holds of the routed experts, or None when it is not one of theirs."""
        match = self._pattern.fullmatch(name)
        if match is None or NEVER.search(name):
            return None
        layer = int(match["layer"])
        if match["fused"]:
            part: Part = "gate_up" if match["fused"] == self.fused[0] else "down"
            return ExpertTensor(layer, None, part)
        at = next(t.index(match["single"]) for t in self.projections if match["single"] in t)
        return ExpertTensor(layer, int(match["expert"]), ("gate", "up", "down")[at])

    def moe_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Decoder layers that have routed experts according to the (text) config."""
        if self.enabled and not config.get(self.enabled):
            return ()
        dense = set(config.get(self.dense_layers) or ()) if self.dense_layers else set()
        first = int(config.get(self.first_dense_layers) or 0) if self.first_dense_layers else 0
        step = int(config.get(self.sparse_step) or 1) if self.sparse_step else 1
        layers = range(int(value(config, ("num_hidden_layers",))))
        return tuple(n for n in layers if n >= first and n not in dense and (n + 1) % step == 0)


ARCHITECTURES = (
    Architecture(
        model_types=("qwen2_moe",),
        containers=("mlp.experts",),
        dense_layers="mlp_only_layers",
        sparse_step="decoder_sparse_step",
    ),
    Architecture(
        model_types=("qwen3_moe",),
        containers=("mlp.experts",),
        dense_layers="mlp_only_layers",
        sparse_step="decoder_sparse_step",
    ),
    Architecture(
        model_types=("mixtral",),
        containers=("block_sparse_moe.experts", "mlp.experts"),
        projections=(("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")),
        intermediate=("intermediate_size",),
    ),
    Architecture(
        model_types=("olmoe",),
        containers=("mlp.experts",),
        intermediate=("intermediate_size",),
    ),
    Architecture(
        model_types=("gemma4", "gemma4_text"),
        containers=("experts", "moe", "moe.experts"),
        intermediate=("moe_intermediate_size", "expert_intermediate_size"),
        top_k=("top_k_experts", "num_experts_per_tok"),
        activation=("hidden_activation", "hidden_act"),
        enabled="enable_moe_block",
        tied=True,
    ),
)


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The table's row for a config.json; raises CheckpointError with the supported list."""
    found = config.get("model_type")
    for architecture in ARCHITECTURES:
        if found in architecture.model_types:
            return architecture
    supported = listing((a.name for a in ARCHITECTURES), limit=99)
    raise CheckpointError(f"model_type {found!r} is not supported; supported are {supported}")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def value(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The first of `keys` that the config has; raises CheckpointError naming them all."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise CheckpointError(f"config.json has no {' or '.join(keys)}")
