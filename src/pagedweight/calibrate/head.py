"""The loss at the end of the model, and its gradient by the last layer's output.

Labels decide which matrix the squared gradients estimate. Drawn from the model's own distribution
they give the Fisher matrix, the second derivative of KL(model || quantized model) at the model,
which is what quality is judged by; the scores of different positions are then uncorrelated. With
the text's own tokens it is the empirical Fisher matrix, which also weighs how surprised the model
is by the text.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from pagedweight.calibrate.stream import StreamedModel

Labels = Literal["model", "text"]
LABELS: tuple[Labels, ...] = ("model", "text")
POSITIONS = 512
"""Positions whose distributions over the vocabulary are in memory at once."""


class HeadLoss:
    """Sum over positions of -log p(label). `labels` as above; draws come from `seed`."""

    def __init__(self, model: StreamedModel, labels: Labels, seed: int) -> None:
        self._model = model
        self._labels = labels
        self._random = torch.Generator(model.device).manual_seed(seed)
        self.nll = 0.0
        """Sum of -log p(next token of the text), whatever the labels."""

    @torch.enable_grad()
    def gradient(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Gradient [T, H] on the device by the last layer's output [T, H]; tokens: int64 [T]."""
        out = torch.empty(hidden.shape, device=self._model.device)
        following = torch.cat([tokens[1:], tokens.new_full((1,), -100)]).to(self._model.device)
        for first in range(0, len(hidden), POSITIONS):
            part = slice(first, first + POSITIONS)
            given = hidden[part].to(self._model.device).requires_grad_()
            logits = self._model.logits(given).float()
            text = functional.cross_entropy(logits, following[part], reduction="sum")
            self.nll += float(text.detach())
            loss = text
            if self._labels == "model":
                drawn = torch.multinomial(
                    logits.detach().softmax(-1), 1, generator=self._random
                ).squeeze(1)
                loss = functional.cross_entropy(logits, drawn, reduction="sum")
            (out[part],) = torch.autograd.grad(loss, given)
        return out
