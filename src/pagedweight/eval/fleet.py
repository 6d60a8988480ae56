"""One model under several precision assignments side by side, and the source among them.

Everything but the routed experts is shared, so a window costs each seat only its own arithmetic,
and changing a seat's bits costs nothing at all: its next forward reads other views of the bank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.policies import Assignment
from pagedweight.errors import CheckpointError, listing
from pagedweight.eval.bank import WeightBank
from pagedweight.eval.experts import LayerSeats, SeatStats, run_experts, seats_of
from pagedweight.eval.reference import EXPERTS, ReferenceModel, expert_modules, load_whole
from pagedweight.kernels.contract import Activation
from pagedweight.kernels.reference.kernel import activate
from pagedweight.runtime.messages import Signals

Seat = Assignment | None
"""None: the source's own weights."""


@dataclass(frozen=True)
class Pass:
    """What a forward gave: logits [S, C, V]; signals by seat, of these C tokens alone."""

    logits: torch.Tensor
    signals: list[Signals]


class Fleet:
    """transformers' model with our experts: `run` is all it does."""

    def __init__(
        self, checkpoint: Checkpoint, source: ReferenceModel | None, dtype: str, device: str
    ) -> None:
        """`source` lends its experts as seat None and is taken apart by it: load it for this.

        Without it the checkpoint's other tensors suffice. Raises CheckpointError on a misfit.
        """
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.bank = WeightBank.of(checkpoint, self.device)
        whole = source or load_whole(checkpoint.path, getattr(torch, dtype), self.device)
        self._model = whole.model
        modules = expert_modules(self._model)
        if sorted(modules) != sorted(checkpoint.moe_layers):
            raise CheckpointError(
                f"{checkpoint.path} has routed experts in layers "
                f"{listing(checkpoint.moe_layers)}, transformers' {type(self._model).__name__} "
                f"in layers {listing(sorted(modules))}"
            )
        kind: Activation = checkpoint.activation  # type: ignore[assignment]
        self._activate = partial(activate, activation=kind)
        for position, layer in enumerate(checkpoint.moe_layers):
            module = modules[layer]
            for number, name in enumerate(EXPERTS):
                weight = getattr(module, name).data
                delattr(module, name)
                if source is not None:
                    self.bank.add_source(position, number, weight)
            module.forward = partial(self._experts, position)
        self._error = _down_error(checkpoint).to(self.device)
        self._layers: list[LayerSeats] = []
        self._stats: list[SeatStats] = []

    @torch.inference_mode()
    def run(self, tokens: torch.Tensor, seats: Sequence[Seat], cache: Any = None) -> Pass:
        """One forward of tokens [C] for every seat; `cache` holds what came before them."""
        self._layers = seats_of(seats, self._error, self.device)
        self._stats = []
        ids = tokens.to(self.device)[None].expand(len(seats), -1)
        found = self._model(input_ids=ids, past_key_values=cache, use_cache=cache is not None)
        return Pass(found.logits, _signals(self._stats))

    @staticmethod
    def cache() -> Any:
        """An empty KV cache, for windows that are run in pieces."""
        from transformers import DynamicCache

        return DynamicCache()

    def _experts(
        self, position: int, hidden: torch.Tensor, ids: torch.Tensor, routing: torch.Tensor
    ) -> torch.Tensor:
        weights, seats = self.bank.weights[position], self._layers[position]
        out, stats = run_experts(hidden, ids, routing, weights, seats, self._activate)
        self._stats.append(stats)
        return out


def _down_error(checkpoint: Checkpoint) -> torch.Tensor:
    """float32 [L, E, 1 + most bits], calibration's error of down at each stored level, by bits."""
    found = checkpoint.calibration().error[:, :, 1]
    out = torch.zeros((*found.shape[:2], checkpoint.bits[-1] + 1))
    out[..., checkpoint.bits[0] :] = torch.from_numpy(np.ascontiguousarray(found))
    return out


def _signals(stats: list[SeatStats]) -> list[Signals]:
    """By seat, layers stacked: what a rank's report would hold."""
    mass, tokens, features = (
        torch.stack([getattr(layer, name) for layer in stats], dim=1).cpu().numpy()
        for name in ("mass", "tokens", "features")
    )
    return [Signals(*parts) for parts in zip(mass, tokens, features, strict=True)]
