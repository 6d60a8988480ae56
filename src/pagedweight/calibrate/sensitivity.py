"""Sensitivity s_i^b (eq. 2) of every linear block at every level, from activation gradients.

With delta the gradient of the loss by a block's output and dW = W - W_b, lowering the block to b
bits moves the loss by -delta^T dW x at a token. Two estimates of what that costs:

- per token: sum over tokens of (delta^T dW x)^2, the diagonal of the Fisher matrix in the direction
  that the codes really take;
- factored: n sum_rc E[delta_r^2] E[x_c^2] dW_rc^2, which takes rows, columns and tokens as
  independent. Cheaper, and blind to errors that add up or cancel.

How damage varies from one piece of text to the next is always the factored estimate's: over a few
dozen tokens it has far less noise. Its segments are scaled to add up to the sensitivity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from pagedweight.calibrate.experts import ExpertCall
from pagedweight.calibrate.measurements import SEGMENTS
from pagedweight.calibrate.segments import segment_of
from pagedweight.core.geometry import KINDS, LayerShape

Method = Literal["per-token", "factored"]
METHODS: tuple[Method, ...] = ("per-token", "factored")
HOLD_BYTES = 1 << 30
"""Routed vectors of a layer that wait for their products on the CPU; more are worked off in
between, which makes every block's levels anew. A GPU holds GPU_SHARE of its memory."""
GPU_SHARE = 0.15
TOKENS_AT_ONCE = 4096

Errors = Callable[[int, str], torch.Tensor]
"""(expert, kind) to W - W_b, float32 [levels, N, K] on the device."""


def per_token(x: torch.Tensor, delta: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """(delta^T dW_b x)^2 of each token and level: [n, K], [n, N], [levels, N, K] -> [n, levels]."""
    out = torch.empty((len(x), len(errors)), device=x.device)
    for first in range(0, len(x), TOKENS_AT_ONCE):
        part = slice(first, first + TOKENS_AT_ONCE)
        for level, error in enumerate(errors):
            out[part, level] = torch.linalg.vecdot(x[part] @ error.T, delta[part]).square()
    return out


def factored(
    x2: torch.Tensor, d2: torch.Tensor, n: torch.Tensor, errors: torch.Tensor
) -> torch.Tensor:
    """n sum_rc E[delta_r^2] E[x_c^2] dW_rc^2 for groups of tokens, float32 [groups, levels].

    x2: sum of x^2 [groups, K]; d2: sum of delta^2 [groups, N]; n: tokens [groups]; all float32.
    """
    products = torch.stack([((d2 @ error.square()) * x2).sum(1) for error in errors], dim=1)
    return products / n.clamp(min=1)[:, None]


def hold_bytes(device: torch.device) -> int:
    """Most bytes of routed vectors that wait."""
    if device.type == "cpu":
        return HOLD_BYTES
    return int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)


class LayerSensitivity:
    """Damage of one layer's blocks, [E, 2, levels], in all and by segment.

    Visit every call of the layer with gradients on, `end_sequence` after each sequence, `close` at
    the end. Holds routed vectors of up to `hold_bytes` and the levels of one block.
    """

    def __init__(
        self,
        shape: LayerShape,
        levels: int,
        sequences: int,
        length: int,
        method: Method,
        errors: Errors,
        device: torch.device,
    ) -> None:
        self._shape, self._length, self._method, self._errors = shape, length, method, errors
        self._device = device
        self.sequence = 0
        pieces = sequences * SEGMENTS
        size = (shape.experts, len(KINDS), levels)
        self.by_segment = torch.zeros((pieces, *size), dtype=torch.float64, device=device)
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self._waiting: dict[tuple[int, str], list[tuple[torch.Tensor, ...]]] = {}
        self._sums: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._held, self._most = 0, hold_bytes(device)

    def visit(self, call: ExpertCall) -> None:
        """Keep a call's inputs, and its outputs' gradient when that comes."""
        piece = self.sequence * SEGMENTS + segment_of(call.token, self._length)
        where, inputs = (call.expert, call.kind), call.inputs  # not `call`: a cycle with its graph

        def keep(delta: torch.Tensor) -> None:
            self._waiting.setdefault(where, []).append((inputs, delta.detach(), piece))
            self._held += 4 * (inputs.numel() + delta.numel())

        call.outputs.register_hook(keep)

    def end_sequence(self) -> None:
        """Work off what waits when it is more than may be held."""
        self.sequence += 1
        if self._held > self._most:
            for expert, kind in list(self._waiting):
                self._work_off(expert, kind, self._errors(expert, kind))
            self._held = 0

    def close(self, second_moment: dict[str, npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
        """Work off the rest; also the weighted squared error, sum_rc E[x_c^2] dW_rc^2, of every
        block, [E, 2, levels], as the levels pass by anyway. second_moment by kind: [E, K]."""
        error = np.empty(self.total.shape, np.float32)
        for expert in range(self._shape.experts):
            for at, kind in enumerate(KINDS):
                errors = self._errors(expert, kind)
                self._work_off(expert, kind, errors)
                moment = torch.from_numpy(second_moment[kind][expert]).to(self._device).double()
                columns = errors.double().square().sum(1)
                error[expert, at] = (columns @ moment).float().cpu().numpy()
                if self._method == "factored" and (expert, kind) in self._sums:
                    x2, d2, n = self._sums[expert, kind]
                    self.total[expert, at] = factored(x2[None], d2[None], n[None], errors)[0]
        whole = self.by_segment.sum(0)
        self.by_segment *= self.total / torch.where(whole > 0, whole, 1.0)
        return error

    def _work_off(self, expert: int, kind: str, errors: torch.Tensor) -> None:
        waiting = self._waiting.pop((expert, kind), [])
        if not waiting:
            return
        x, delta, piece = (torch.cat([part[i] for part in waiting]) for i in range(3))
        if self._method == "per-token":
            found = per_token(x, delta, errors)
            self.total[expert, KINDS.index(kind)] += found.sum(0, dtype=torch.float64)
        segments, row = piece.unique(return_inverse=True)  # a segment never waits in two parts
        x2, d2, n = self._grouped(x, delta, row, len(segments))
        parts = factored(x2, d2, n, errors)
        self.by_segment[segments, expert, KINDS.index(kind)] = parts.double()
        sums = (x2.sum(0), d2.sum(0), n.sum())
        if (expert, kind) in self._sums:
            before = self._sums[expert, kind]
            sums = (before[0] + sums[0], before[1] + sums[1], before[2] + sums[2])
        self._sums[expert, kind] = sums

    def _grouped(
        self, x: torch.Tensor, delta: torch.Tensor, row: torch.Tensor, groups: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sums of x^2, delta^2 and tokens by group, float32."""

        def summed(values: torch.Tensor) -> torch.Tensor:
            out = torch.zeros((groups, values.shape[1]), device=x.device)
            return out.index_add_(0, row, values)

        n = torch.bincount(row, minlength=groups).float()
        return summed(x.square()), summed(delta.square()), n
