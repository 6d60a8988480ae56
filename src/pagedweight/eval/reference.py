"""The reference engine: transformers' model with experts dequantized from the checkpoint.

It needs no source: everything but the routed experts lies in the checkpoint as it was. Arithmetic
is float32 unless asked otherwise, so that a divergence is what the weights cause: computing in
bfloat16 alone moves lab-moe's distributions by a KL of 0.0014, about what 6 bits do.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import KINDS
from pagedweight.errors import CheckpointError, listing

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

EXPERTS = ("gate_up_proj", "down_proj")
"""transformers' names of a layer's experts, [E, 2I, H] and [E, H, I], by kind."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class ReferenceModel:
    """A causal language model on one device; `logits` is all it does."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self.model = model.to(device).eval()
        self.device = device

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[W, V] for one window of tokens [W], on the device, in the model's type."""
        found = self.model(input_ids=tokens[None].to(self.device), use_cache=False)
        return found.logits[0]


def load_plain(path: Path, dtype: torch.dtype, device: torch.device) -> ReferenceModel:
    """An unquantized checkpoint. Raises CheckpointError when transformers cannot load it."""
    model, missing = _load(path, dtype)
    if missing:
        raise CheckpointError(f"{path} lacks tensors of the model: {listing(missing)}")
    return ReferenceModel(model, device)


def load_quantized(
    checkpoint: Checkpoint, plan: np.ndarray, dtype: torch.dtype, device: torch.device
) -> ReferenceModel:
    """A quantized checkpoint at the bits of `plan` [L, E, 2], dequantized to `dtype`.

    Raises CheckpointError when the checkpoint and transformers' model do not fit.
    """
    whole = load_whole(checkpoint.path, dtype, device)
    model, modules = whole.model, expert_modules(whole.model)
    found = sorted(modules)
    if found != sorted(checkpoint.moe_layers):
        raise CheckpointError(
            f"{checkpoint.path} has routed experts in layers {listing(checkpoint.moe_layers)}, "
            f"transformers' {type(model).__name__} in layers {listing(found)}"
        )
    for position, layer in enumerate(checkpoint.moe_layers):
        for kind, name in enumerate(EXPERTS):
            weight = getattr(modules[layer], name)
            _fill(weight.data, checkpoint, plan, position, kind)
    return whole


def load_whole(path: Path, dtype: torch.dtype, device: torch.device) -> ReferenceModel:
    """A quantized checkpoint's model with experts that hold nothing yet.

    Raises CheckpointError when another tensor is missing.
    """
    model, missing = _load(path, dtype)
    if absent := [name for name in missing if name.rsplit(".", 1)[-1] not in EXPERTS]:
        raise CheckpointError(f"{path} lacks tensors: {listing(absent)}")
    return ReferenceModel(model, device)


def _fill(
    weight: torch.Tensor, checkpoint: Checkpoint, plan: np.ndarray, position: int, kind: int
) -> None:
    block, experts = checkpoint.shape.blocks[kind], checkpoint.shape.experts
    if tuple(weight.shape) != (experts, block.rows, block.cols):
        raise CheckpointError(
            f"transformers' {EXPERTS[kind]} is {list(weight.shape)}, the checkpoint's "
            f"{[experts, block.rows, block.cols]}"
        )
    for expert in range(experts):
        bits = int(plan[position, expert, kind])
        weight[expert] = checkpoint.dequantize(position, expert, KINDS[kind], bits, weight.dtype)


def expert_modules(model: torch.nn.Module) -> dict[int, Any]:
    """Modules that hold routed experts as 3-D parameters, by decoder layer."""
    found = {}
    for name, module in model.named_modules():
        weight, layer = module._parameters.get(EXPERTS[0]), _LAYER.search(name)
        if weight is not None and weight.ndim == 3 and layer:
            found[int(layer[1])] = module
    return found


def _load(path: Path, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """transformers' model from a folder's plain tensors, and the names that it did not find."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # not a method of transformers'
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, output_loading_info=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"transformers cannot load {path}: {error}") from error
    return model, sorted(info["missing_keys"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' report of missing experts and without its progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
