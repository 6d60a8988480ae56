"""One family of MoE models: its tensor names, its config keys, and what both say of a model.

The rows are in `names.py`. A row answers two questions: which tensors of a checkpoint are routed
experts (`parse`), and what a config.json promises before any weight is there (`facts`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pagedweight.core.geometry import LayerShape
from pagedweight.errors import CheckpointError, listing

Part = Literal["gate", "up", "down", "gate_up"]
Keys = tuple[str, ...]
"""Config keys for one number; the first that a config has counts."""

PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
"""What may stand before `layers.N.`: text-only models, and text models inside a larger one."""

NEVER = re.compile(
    r"(^|\.)(gate|router)(\.|$)|shared_expert|embed|lm_head|norm|attn|attention|vision|audio"
)
"""Never quantized, whatever else a table says: routers, shared experts, embeddings, heads, norms,
attention and towers for other inputs."""

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
class KVLayer:
    """KV cache of one decoder layer: `heads` of `head_values` values (keys and values) a token.

    Tensor parallelism deals out whole heads and gives each rank at least one, so a latent cache
    (one head) is whole on every rank. `window`: tokens that a sliding layer keeps, None for all.
    """

    heads: int
    head_values: int
    window: int | None

    def values(self, ranks: int = 1) -> int:
        """Values that one of `ranks` keeps of a token."""
        return -(-self.heads // ranks) * self.head_values


@dataclass(frozen=True)
class ModelFacts:
    """What a config.json promises. `moe_layers`: decoder layers with routed experts, ascending;
    `prediction_layers`: layers stored after the last one that only predict further tokens
    (multi-token prediction): not served, so their experts are copied as they are."""

    architecture: str
    shape: LayerShape
    moe_layers: tuple[int, ...]
    num_hidden_layers: int
    prediction_layers: tuple[int, ...]
    activation: str
    top_k: int
    tied: bool
    kv: tuple[KVLayer, ...]


@dataclass(frozen=True)
class Architecture:
    """One family: config keys and names below `layers.N.`.

    Names. `containers`: modules that hold the experts. `projections`: (gate, up, down) names of the
    per-expert layout, each followed by `.weight`. `fused`: (gate_up, down) names of the 3-D layout,
    with or without `.weight`. `renamed`: published names to those of transformers' modules, for
    tensors that are not experts.

    Layers. `enabled`: a key that must be true for any layer to have experts. `dense_layers`: a list
    of layers without. `first_dense_layers`: how many at the start have none. `sparse_step`: layer n
    has experts when (n + 1) is a multiple of it; `layer_frequency`: when n is.
    `prediction_layers`: how many layers follow for multi-token prediction.

    KV cache. `latent_kv`: keys whose sum is the width of a latent cache. `wide_kv`: (head width, KV
    heads) keys of full-attention layers where sliding ones have others; the second counts only with
    `attention_k_eq_v`.

    `tied`: embeddings are tied when the config does not say.
    """

    model_types: tuple[str, ...]
    containers: tuple[str, ...]
    projections: tuple[tuple[str, str, str], ...] = (("gate_proj", "up_proj", "down_proj"),)
    fused: tuple[tuple[str, str], ...] = (("gate_up_proj", "down_proj"),)
    renamed: tuple[tuple[str, str], ...] = ()
    experts: Keys = ("num_experts", "num_local_experts")
    hidden: Keys = ("hidden_size",)
    intermediate: Keys = ("moe_intermediate_size",)
    top_k: Keys = ("num_experts_per_tok",)
    activation: Keys = ("hidden_act",)
    enabled: str | None = None
    dense_layers: str | None = None
    first_dense_layers: str | None = None
    sparse_step: str | None = None
    layer_frequency: str | None = None
    prediction_layers: str | None = None
    latent_kv: Keys = ()
    wide_kv: tuple[str, str] | None = None
    tied: bool = False

    @property
    def name(self) -> str:
        return self.model_types[0]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        prefixes = "|".join(re.escape(p) for p in PREFIXES)
        containers = "|".join(re.escape(c) for c in self.containers)
        single = "|".join(re.escape(n) for triple in self.projections for n in triple)
        fused = "|".join(re.escape(n) for pair in self.fused for n in pair)
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
            first = {pair[0] for pair in self.fused}
            part: Part = "gate_up" if match["fused"] in first else "down"
            return ExpertTensor(layer, None, part)
        at = next(t.index(match["single"]) for t in self.projections if match["single"] in t)
        return ExpertTensor(layer, int(match["expert"]), ("gate", "up", "down")[at])

    def below_layers(self, name: str) -> str:
        """A tensor's name as transformers' text model has it, from `layers.N.` (or whatever stands
        at the top) on."""
        prefix = max((p for p in PREFIXES if name.startswith(p)), key=len)
        below = name[len(prefix) :]
        for published, own in self.renamed:
            below = below.replace(published, own)
        return below

    def moe_layers(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Decoder layers that have routed experts according to the (text) config."""
        if self.enabled and not config.get(self.enabled):
            return ()
        dense = set(config.get(self.dense_layers) or ()) if self.dense_layers else set()
        first = _count(config, self.first_dense_layers, 0)
        step = _count(config, self.sparse_step, 1)
        frequency = _count(config, self.layer_frequency, 1)
        return tuple(
            n
            for n in range(int(value(config, ("num_hidden_layers",))))
            if n >= first and n not in dense and (n + 1) % step == 0 and n % frequency == 0
        )

    def facts(self, config: Mapping[str, Any]) -> ModelFacts:
        """What config.json says of a model; CheckpointError names a key that is absent or wrong."""
        text = text_config(config)
        layers = positive(text, ("num_hidden_layers",))
        moe_layers = self.moe_layers(text)
        if not moe_layers:
            raise CheckpointError(
                f"no layer has routed experts by this config.json (model_type {self.name}): "
                f"a dense model has nothing to page"
            )
        predicting = _count(text, self.prediction_layers, 0)
        experts, top_k = positive(text, self.experts), positive(text, self.top_k)
        if top_k > experts:
            raise CheckpointError(f"config.json: {top_k} experts for a token, of {experts}")
        types = text.get("layer_types")
        if types and (not isinstance(types, list) or len(types) < layers):
            raise CheckpointError(f"config.json: layer_types does not name all {layers} layers")
        return ModelFacts(
            architecture=self.name,
            shape=LayerShape(
                experts=experts,
                hidden=positive(text, self.hidden),
                intermediate=positive(text, self.intermediate),
            ),
            moe_layers=moe_layers,
            num_hidden_layers=layers,
            prediction_layers=tuple(range(layers, layers + predicting)),
            activation=_activation(text, self),
            top_k=top_k,
            tied=_tied(config, text, self),
            kv=tuple(self._kv_layer(text, n) for n in range(layers)),
        )

    def _kv_layer(self, text: Mapping[str, Any], layer: int) -> KVLayer:
        if self.latent_kv:
            return KVLayer(1, sum(positive(text, (key,)) for key in self.latent_kv), None)
        types = text.get("layer_types")
        sliding = bool(types) and types[layer] == "sliding_attention"
        attention = positive(text, ("num_attention_heads",))
        heads = text.get("num_key_value_heads") or attention
        width = text.get("head_dim") or positive(text, self.hidden) // attention
        if self.wide_kv and not sliding:
            width = text.get(self.wide_kv[0]) or width
            if text.get("attention_k_eq_v"):
                heads = text.get(self.wide_kv[1]) or heads
        window = text.get("sliding_window") if sliding else None
        return KVLayer(int(heads), 2 * int(width), window)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def value(config: Mapping[str, Any], keys: Keys) -> Any:
    """The first of `keys` that the config has; raises CheckpointError naming them all."""
    for key in keys:
        if config.get(key) is not None:
            return config[key]
    raise CheckpointError(f"config.json has no {' or '.join(keys)}")


def positive(config: Mapping[str, Any], keys: Keys) -> int:
    """A count; raises CheckpointError when there is none or it is not positive."""
    found = value(config, keys)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise CheckpointError(
            f"config.json: {' or '.join(keys)} is {found!r}, not a positive count"
        )
    return found


def _count(config: Mapping[str, Any], key: str | None, default: int) -> int:
    return int(config.get(key) or default) if key else default


def _activation(config: Mapping[str, Any], architecture: Architecture) -> str:
    found = value(config, architecture.activation)
    if found not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json: the experts' activation {found!r} is not supported; "
            f"supported are {listing(ACTIVATIONS)}"
        )
    return ACTIVATIONS[found]


def _tied(config: Mapping[str, Any], text: Mapping[str, Any], architecture: Architecture) -> bool:
    for place in (config, text):
        if isinstance(place.get("tie_word_embeddings"), bool):
            return bool(place["tie_word_embeddings"])
    return architecture.tied
