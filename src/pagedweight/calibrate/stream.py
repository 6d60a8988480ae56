"""A model of which one decoder layer is in memory at a time, forward and backward.

transformers builds the text model without weights. Every decoder layer but the current one passes
its input on, so the model's own forward prepares masks, positions and whatever else an architecture
hands to its layers, and only the current layer computes: it starts from the activations that the
layers before it left in the buffer, whatever the model does to embeddings on their way in.
The head runs the same way, with every layer passing on. Backward, a layer runs again from its kept
input and hands on the gradient; weights have none. Everything is float32, and experts add to a
token in the order of their numbers, so that a run repeats to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from pagedweight.calibrate.buffer import ActivationBuffer
from pagedweight.calibrate.experts import Experts, Weights, read_experts, run_experts
from pagedweight.calibrate.moments import LayerMoments, MomentSums
from pagedweight.checkpoint.names import text_config
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.errors import CheckpointError

LINKS_LAYERS = ("num_kv_shared_layers", "hidden_size_per_layer_input")
"""Config keys of models whose layers take more than their predecessor's output."""

HEAD = -2
"""In place of a layer's number: the final norm and the head."""


class StreamedModel:
    """The text model of a source, on one device, a decoder layer at a time."""

    def __init__(self, source: SourceCheckpoint, device: torch.device) -> None:
        self.source = source
        self.device = device
        self.causal = _build(source).requires_grad_(False)
        self.model = self.causal.get_decoder()
        self._layer = -1
        self._input = torch.empty(0)
        self._routed = [_experts_module(layer) for layer in self.model.layers]
        for number, layer in enumerate(self.model.layers):
            layer.forward = self._run_or_pass(number, layer.forward)
        self._norm = self.model.norm
        self.model.norm = torch.nn.Identity()  # only the layers count, until `load_head`
        _real_buffers(self.model, device)
        self._names = _names_below(source)

    def load(self, number: int, experts: Experts | None) -> None:
        """Bring in a layer's weights but its routed experts, for which `experts` stands in."""
        self._layer = number
        layer = self.model.layers[number]
        routed = self._routed[number]
        if (routed is None) != (experts is None):
            raise CheckpointError(
                f"layer {number} of {self.source.path} "
                f"{'lacks' if routed is None else 'has'} routed experts in transformers' "
                f"{type(self.model).__name__}, unlike its config.json says"
            )
        if routed is not None:
            # Not parameters for `_fill` to miss: the weights come through `experts`.
            routed.forward = experts
            for name in [name for name, _ in routed.named_parameters(recurse=False)]:
                delattr(routed, name)
        self._fill(layer, f"layers.{number}.")

    def drop(self, number: int) -> None:
        """Forget a layer's weights."""
        self.model.layers[number].to("meta")
        self._layer = -1

    @torch.inference_mode()
    def embed(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        """The first layer's input [T, H] for each of tokens, int64 [sequences, T].

        Holds the table in the source's type; the model's module (which may scale, as may the model)
        gets the rows of the tokens that occur.
        """
        module = self.model.embed_tokens
        used, row = tokens.unique(return_inverse=True)
        table = self.source.read(self._name("embed_tokens.weight"))[used]
        module.padding_idx = None  # matters to gradients only, and counts rows that are not here
        module.weight = torch.nn.Parameter(table.to(self.device, torch.float32), False)
        for ids in row:
            yield self.run(module(ids.to(self.device)))  # no layer is loaded: all pass it on
        module.to("meta")

    @torch.inference_mode()
    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """The loaded layer's output [T, H] for the input `hidden` [T, H] of one sequence."""
        self._input = hidden[None].to(self.device)
        return self.model(inputs_embeds=self._input, use_cache=False).last_hidden_state[0]

    @torch.enable_grad()
    def pull_back(self, hidden: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Run the loaded layer again on `hidden` [T, H] and take the gradient of its output,
        [T, H] on the device, back to its input."""
        self._input = hidden[None].to(self.device).requires_grad_()
        out = self.model(inputs_embeds=self._input, use_cache=False).last_hidden_state
        (back,) = torch.autograd.grad(out, self._input, gradient[None])
        return back[0]

    def load_head(self) -> None:
        """Bring in the final norm and the head, for `logits`."""
        self._layer = HEAD
        self.model.norm = self._norm
        self._fill(self._norm, "norm.")
        stored = "embed_tokens." if self.source.tied else "lm_head."
        self._fill(self.causal.lm_head, stored)

    def drop_head(self) -> None:
        """Forget the head's weights; only the layers count again."""
        self._layer = -1
        self.causal.lm_head.to("meta")
        self._norm.to("meta")
        self.model.norm = torch.nn.Identity()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] for the last layer's output at n positions, [n, H] on the device."""
        self._input = hidden[None]
        return self.causal(inputs_embeds=self._input, use_cache=False).logits[0]

    def _run_or_pass(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        last = number == len(self.model.layers) - 1

        def run_or_pass(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._layer == HEAD and last:
                return self._input
            if number != self._layer:
                return hidden_states
            return forward(self._input, *args, **kwargs)

        return run_or_pass

    def _name(self, below: str) -> str:
        """The source's name of what the text model calls `below`."""
        if below not in self._names:
            raise CheckpointError(
                f"{self.source.path} has no tensor for {below}, which transformers' "
                f"{type(self.model).__name__} needs"
            )
        return self._names[below]

    def _fill(self, module: torch.nn.Module, prefix: str) -> None:
        """Load every parameter and stored buffer of `module`, in float32."""
        tensors = {}
        for key, wanted in module.state_dict().items():
            name = self._name(prefix + key)
            tensor = self.source.read(name)
            if tensor.shape != wanted.shape:
                raise CheckpointError(
                    f"{name} is {list(tensor.shape)}, transformers' {type(self.model).__name__} "
                    f"wants {list(wanted.shape)}"
                )
            tensors[key] = tensor.to(self.device, torch.float32)
        module.load_state_dict(tensors, assign=True)


class StreamedMoments:
    """Moments of the calibration tokens, decoder layer by decoder layer.

    Holds one layer's weights (routed experts in the source's type), with `products` its experts'
    E[x x^T], and the activations of all tokens, float32, in memory or, when large, in a file below
    `scratch`.
    """

    def __init__(
        self,
        source: SourceCheckpoint,
        tokens: torch.Tensor,
        device: torch.device,
        scratch: Path,
        products: bool = False,
    ) -> None:
        self.source = source
        self._products = products
        self.model = StreamedModel(source, device)
        self.buffer = ActivationBuffer((*tokens.shape, source.shape.hidden), scratch)
        for number, hidden in enumerate(self.model.embed(tokens)):
            self.buffer.write(number, hidden)
        self._next = 0
        self._weights: Weights = {}

    def advance(self, layer: int) -> tuple[LayerMoments, Callable[[int, str], torch.Tensor]] | None:
        """Run all sequences through `layer`, the one after the last; see `Measurer`."""
        if layer != self._next:
            raise ValueError(f"layer {layer} asked for, {self._next} is next")
        self._next += 1
        self._weights.clear()
        sums, experts = None, None
        if layer in self.source.moe_layers:
            position = self.source.moe_layers.index(layer)
            self._weights = read_experts(self.source, position, self.model.device)
            sums = MomentSums(self.source.shape, self.model.device, self._products)
            experts = run_experts(self._weights, self.source.activation, sums.visit)
        self.model.load(layer, experts)
        for number in range(len(self.buffer)):
            self.buffer.write(number, self.model.run(self.buffer.read(number)))
        self.model.drop(layer)
        if sums is None:
            return None
        weights = self._weights
        return sums.moments(), lambda expert, kind: weights.pop((expert, kind))


def _build(source: SourceCheckpoint) -> Any:
    """The language model without weights; raises CheckpointError when transformers has none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(source.path).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"transformers cannot build {source.path}: {error}") from error
    for key in LINKS_LAYERS:
        if getattr(config, key, 0):
            raise CheckpointError(
                f"{source.path}: {key} is {getattr(config, key)}, so layers need more than the "
                f"output of the layer before them, which calibration a layer at a time does not "
                f"support; quantize without --calibration"
            )
    return model.eval()


def _real_buffers(model: Any, device: torch.device) -> None:
    """Compute what no checkpoint stores (rotary frequencies, embedding scales), on the device.

    transformers' own `_init_weights` knows each; it leaves parameters on "meta" as they are.
    """
    for module in model.modules():
        names = [n for n in module._non_persistent_buffers_set if module._buffers[n] is not None]
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device=device)
        if names:
            model._init_weights(module)


def _experts_module(layer: torch.nn.Module) -> Any:
    """The module that holds a layer's routed experts as 3-D parameters, or None."""
    for module in layer.modules():
        weight = module._parameters.get("gate_up_proj")
        if weight is not None and weight.ndim == 3:
            return module
    return None


def _names_below(source: SourceCheckpoint) -> dict[str, str]:
    """Tensor names as the text model knows them (`layers.0...`) to names in the source."""
    return {source.architecture.below_layers(name): name for name in source.plain_names()}


def context_length(source: SourceCheckpoint) -> int | None:
    """Positions that the model was made for, None when its config does not say."""
    found = text_config(source.config).get("max_position_embeddings")
    return int(found) if isinstance(found, int) else None
