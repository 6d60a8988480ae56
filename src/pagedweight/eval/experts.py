"""Routed experts of several precision assignments side by side, in one layer's forward.

Routed tokens of all seats are sorted by (expert, level), so that seats which read an expert at the
same bits share one product with one view of the bank. Sums over a token's choices are taken in the
order of its choices. What the kernels' `LayerStats` count is counted here too, seat by seat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagedweight.core.policies import Assignment
from pagedweight.eval.bank import SOURCE

Weights = dict[int, torch.Tensor]
Activate = Callable[[torch.Tensor], torch.Tensor]
LEVELS = 16
"""More than any level: groups are expert * LEVELS + level."""


@dataclass(frozen=True, eq=False)
class LayerSeats:
    """Bits of one layer for S seats.

    levels: int64 [kinds, S, 2, E], bits by choice (low, high); SOURCE in the source's seat.
    share:  by seat, part of the tokens that read the high choice.
    error:  by seat, float32 [E], expected squared error of down at the low choice; None: no choice.
    """

    levels: torch.Tensor
    share: list[float]
    error: list[torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class SeatStats:
    """`LayerStats` of every seat: mass, tokens float32 [S, E], features float32 [S, E, 2, 3]."""

    mass: torch.Tensor
    tokens: torch.Tensor
    features: torch.Tensor


def run_experts(
    hidden: torch.Tensor,
    expert_ids: torch.Tensor,
    routing: torch.Tensor,
    weights: tuple[Weights, ...],
    seats: LayerSeats,
    activate: Activate,
) -> tuple[torch.Tensor, SeatStats]:
    """The experts' sum [S * C, H] for S seats of C tokens each, seat after seat, and statistics.

    hidden: [S * C, H]; expert_ids: [S * C, k]; routing: [S * C, k]; weights: by kind, the bank's.
    """
    count, experts, top_k = seats.levels.shape[1], seats.levels.shape[3], expert_ids.shape[1]
    seat = torch.arange(count, device=hidden.device).repeat_interleave(len(hidden) // count)
    side = (seat * 2 + _choices(hidden, expert_ids, routing, seats))[:, None]
    expert = expert_ids.flatten()
    levels = seats.levels.flatten(1)[:, (side * experts + expert_ids).flatten()]
    groups = expert * LEVELS + levels
    sizes = torch.stack([torch.bincount(g, minlength=experts * LEVELS) for g in groups]).tolist()
    order, down = (torch.argsort(g, stable=True) for g in groups)
    x = hidden[order // top_k]
    gate, up = _products(x, sizes[0], weights[0]).chunk(2, dim=1)
    inner = torch.empty_like(gate)
    inner[order] = activate(gate) * up
    out = torch.empty((len(expert), hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
    out[down] = _products(inner[down], sizes[1], weights[1])
    r = routing.flatten().to(torch.float32)
    norms = hidden.float().norm(dim=1).repeat_interleave(top_k), inner.float().norm(dim=1)
    at = (seat[:, None] * experts + expert_ids).flatten()
    stats = _statistics(at, r, norms, count, experts)
    weighted = out * r.to(out.dtype)[:, None]
    return weighted.unflatten(0, (-1, top_k)).sum(dim=1), stats


def _choices(
    hidden: torch.Tensor, expert_ids: torch.Tensor, routing: torch.Tensor, seats: LayerSeats
) -> torch.Tensor:
    """int64 [S * C]: 1 for the tokens of a seat that read its high choice.

    Those of the largest estimated squared error at the low one: |x|^2 sum_k r_k^2 error(e_k), with
    calibration's mean error of the expert. The share is met in every piece of text.
    """
    choice = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    each = len(hidden) // len(seats.share)
    for number, (share, error) in enumerate(zip(seats.share, seats.error, strict=True)):
        if error is None:
            continue
        part = slice(number * each, (number + 1) * each)
        harm = (routing[part].float() ** 2 * error[expert_ids[part]]).sum(dim=1)
        estimate = hidden[part].float().square().sum(dim=1) * harm
        choice[part][torch.topk(estimate, round(share * each)).indices] = 1
    return choice


def _products(x: torch.Tensor, sizes: list[int], weights: Weights) -> torch.Tensor:
    """x [n, K] in consecutive groups, each times its expert at its level: [n, N]."""
    width = next(iter(weights.values())).shape[1]
    out = torch.empty((len(x), width), dtype=x.dtype, device=x.device)
    start = 0
    for number, size in enumerate(sizes):
        if not size:
            continue
        expert, level = divmod(number, LEVELS)
        part = slice(start, start + size)
        torch.mm(x[part], weights[level][expert].to(x.dtype).T, out=out[part])
        start += size
    return out


def _statistics(
    at: torch.Tensor,
    r: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor],
    seats: int,
    experts: int,
) -> SeatStats:
    """Sums over routed tokens [n] by seat and expert (`at`), from r and the norms of the inputs."""
    zeros = torch.zeros(seats * experts, dtype=torch.float32, device=r.device)

    def by_expert(values: torch.Tensor) -> torch.Tensor:
        return zeros.index_add(0, at, values).view(seats, experts)

    features = torch.zeros((seats, experts, 2, 3), dtype=torch.float32, device=r.device)
    for kind, norm in enumerate(norms):
        features[:, :, kind, 0] = by_expert(r * norm)
        features[:, :, kind, 1] = by_expert(r * norm * norm)
        top = zeros.scatter_reduce(0, at, norm, "amax")
        features[:, :, kind, 2] = top.view(seats, experts)
    return SeatStats(by_expert(r), by_expert(torch.ones_like(r)), features)


def seats_of(
    seats: Sequence[Assignment | None], error: torch.Tensor, device: torch.device
) -> list[LayerSeats]:
    """Seats of every layer; None is the source. error: float32 [L, E, bits], of down, by bits."""
    layers, experts = error.shape[:2]
    levels = torch.full((layers, 2, len(seats), 2, experts), SOURCE, dtype=torch.int64)
    for at, seat in enumerate(seats):
        if seat is not None:
            high = seat.bits if seat.high is None else seat.high
            for choice, bits in enumerate((seat.bits, high)):
                levels[:, :, at, choice] = torch.from_numpy(bits).long().permute(0, 2, 1)
    moved = levels.to(device)
    share = [seat.share if seat is not None and seat.high is not None else 0.0 for seat in seats]
    return [
        LayerSeats(
            moved[layer],
            share,
            [
                error[layer].gather(1, moved[layer, 1, at, 0, :, None])[:, 0] if part else None
                for at, part in enumerate(share)
            ],
        )
        for layer in range(layers)
    ]
