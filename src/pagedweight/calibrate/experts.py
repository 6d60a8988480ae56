"""The routed experts of one layer in plain torch, with a visitor at every linear block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.nn import functional

from pagedweight.checkpoint.source import READERS, SourceCheckpoint
from pagedweight.core.geometry import KINDS

Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden states [T, H], expert ids [T, k], routing weights [T, k]) to the experts' sum [T, H]."""
STAGING_BYTES = 16 << 20
"""Page-locked memory of each reader."""
Weights = dict[tuple[int, str], torch.Tensor]
"""(expert, kind) to [N, K] in the source's type."""

ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class ExpertCall:
    """One linear block applied to the n tokens that were routed to its expert.

    inputs:  [n, K], outside of any graph.
    outputs: [n, N] before activation and routing weight, in the graph when gradients are on.
    weights: r, [n]; token: int64 [n], positions in the sequence, ascending.
    """

    expert: int
    kind: str
    inputs: torch.Tensor
    outputs: torch.Tensor
    weights: torch.Tensor
    token: torch.Tensor


def read_experts(source: SourceCheckpoint, layer_pos: int, device: torch.device) -> Weights:
    """All routed experts of a layer on the device; for a GPU some are read at a time, since one
    core copies far less than the bus takes."""
    wanted = [(expert, kind) for expert in range(source.shape.experts) for kind in KINDS]
    if device.type == "cpu":
        return {block: source.expert(layer_pos, *block) for block in wanted}
    mine = threading.local()

    def read(block: tuple[int, str]) -> torch.Tensor:
        if not hasattr(mine, "staging"):
            mine.staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        return read_block(source, layer_pos, block, device, mine.staging)

    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(wanted, pool.map(read, wanted), strict=True))


def read_block(
    source: SourceCheckpoint,
    layer_pos: int,
    block: tuple[int, str],
    device: torch.device,
    staging: torch.Tensor,
) -> torch.Tensor:
    """One linear block [N, K] in the source's type on the device, by way of `staging`."""
    expert, kind = block
    geometry = source.shape.blocks[KINDS.index(kind)]
    out = torch.empty((geometry.rows, geometry.cols), dtype=source.dtype, device=device)
    source.copy_expert(layer_pos, expert, kind, out, staging)
    return out


def run_experts(weights: Weights, activation: str, visit: Callable[[ExpertCall], None]) -> Experts:
    """The experts as a function that stands in for their module's forward."""
    activate = ACTIVATE[activation]
    experts = 1 + max(expert for expert, _ in weights)

    def forward(
        hidden: torch.Tensor, expert_ids: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(experts):
            token, choice = torch.where(expert_ids == expert)
            if not len(token):
                continue
            x, r = hidden[token], routing_weights[token, choice]
            pre = functional.linear(x, weights[expert, "gate_up"].float())
            visit(ExpertCall(expert, "gate_up", x.detach(), pre, r.detach(), token))
            gate, up = pre.chunk(2, dim=-1)
            inner = activate(gate) * up
            y = functional.linear(inner, weights[expert, "down"].float())
            visit(ExpertCall(expert, "down", inner.detach(), y, r.detach(), token))
            # Tokens of one expert are distinct: no two sums meet, the order is the experts'.
            out.index_add_(0, token, y * r[:, None])
        return out

    return forward
