"""What a model holds beside its routed experts, counted from config.json alone.

transformers builds the model without storage (torch's meta device), so that names and shapes are
those of its own classes, for every architecture, and no formula is kept here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedweight.checkpoint.architecture import Architecture, ModelFacts, text_config
from pagedweight.errors import CheckpointError

DTYPES = ("bfloat16", "float16", "float32")
GROUPS = (
    ("shared experts", re.compile(r"shared_expert|shared_mlp")),
    ("embeddings and head", re.compile(r"embed|lm_head")),
    ("attention", re.compile(r"attn|attention")),
    ("norms", re.compile(r"norm")),
)
"""What a tensor belongs to, by its name; the first that matches. The rest is "other": routers,
dense layers, towers for other inputs."""


@dataclass(frozen=True)
class PlainWeights:
    """dtype: the source's name of the type. nbytes: all plain tensors. groups: bytes by group."""

    dtype: str
    nbytes: int
    groups: Mapping[str, int]


def plain_weights(
    config: Mapping[str, Any], architecture: Architecture, facts: ModelFacts
) -> PlainWeights:
    """Tensors that stay as they are, in the source's type; a tied head counts once.

    Raises CheckpointError when transformers cannot build the model, or builds one whose experts are
    not those that the table of architectures promises.
    """
    name = config.get("dtype") or config.get("torch_dtype")
    name = name or text_config(config).get("dtype") or text_config(config).get("torch_dtype")
    if name not in DTYPES:
        raise CheckpointError(f"config.json has dtype {name!r}, not one of {', '.join(DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    groups: dict[str, int] = {}
    experts = 0
    for tensor, values in _tensors(config, facts.tied).items():
        if architecture.parse(tensor):
            experts += values
        else:
            group = next((g for g, pattern in GROUPS if pattern.search(tensor)), "other")
            groups[group] = groups.get(group, 0) + values * dtype.itemsize
    shape = facts.shape
    promised = len(facts.moe_layers) * shape.experts * 3 * shape.hidden * shape.intermediate
    if experts != promised:
        raise CheckpointError(
            f"transformers' {architecture.name} has {experts} weights in routed experts by this "
            f"config.json, and {promised} were expected: the counts would not be right"
        )
    return PlainWeights(str(name), sum(groups.values()), groups)


def _tensors(config: Mapping[str, Any], tied: bool) -> dict[str, int]:
    """Values of every stored tensor of the model, by name."""
    import transformers

    content = {k: v for k, v in config.items() if k not in ("quantization_config", "auto_map")}
    try:
        parsed = transformers.AutoConfig.for_model(**content)
        with torch.device("meta"):
            model = _class(config)(parsed)
    except Exception as error:  # whatever its classes make of numbers that cannot be
        raise CheckpointError(f"transformers cannot build this config.json: {error}") from error
    stored = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    found = {}
    for name, tensor in stored.items():
        head = tied and name.endswith("lm_head.weight")
        if id(tensor) not in seen and not head:
            seen.add(id(tensor))
            found[name] = tensor.numel()
    return found


def _class(config: Mapping[str, Any]) -> Any:
    """The class that config.json names, else the causal model of its type."""
    import transformers

    for name in config.get("architectures") or ():
        if found := getattr(transformers, str(name), None):
            return found
    return transformers.AutoModelForCausalLM.from_config
