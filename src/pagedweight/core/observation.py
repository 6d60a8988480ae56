"""O_t: what the planner sees of the server at one step, KV pressure and runtime signals.

The only clock is the scheduler's step number. Requests' signals are merged into one table for the
batch, weighed by the KV blocks that each request holds (paper 3.2, batched serving).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedweight.core.calibration import Calibration
from pagedweight.core.holdings import Holding
from pagedweight.core.residual import Float32, log_features, predict_residual
from pagedweight.core.size_table import FloatArray, IntArray


@dataclass(frozen=True)
class KVPressure:
    """The KV side of a step, in blocks over all layers of one rank.

    block_bytes:    B_KV.
    total_blocks:   blocks that the scheduler was told of, `num_gpu_blocks`, the null block among
                    them.
    usable_blocks:  blocks that are backed by memory now, without the null block.
    free_blocks:    F_blk: usable blocks that no request holds.
    pending_blocks: blocks that waiting requests need, prompts counted in full. Of those that could
                    start if there were KV: one that waits for a sequence slot frees nothing by it.
    head_blocks:    of those, what the request at the head of the queue needs.
    growth_blocks:  blocks that running requests will take before help can arrive.
    headroom_bytes: pool memory that neither weights nor KV hold.
    granule_blocks: KV grows and shrinks by this many blocks at a time.
    """

    block_bytes: int
    total_blocks: int
    usable_blocks: int
    free_blocks: int
    pending_blocks: int = 0
    head_blocks: int = 0
    growth_blocks: int = 0
    headroom_bytes: int = 0
    granule_blocks: int = 1

    def __post_init__(self) -> None:
        ordered = 0 <= self.free_blocks <= self.usable_blocks <= self.total_blocks - 1
        if not ordered:
            raise ValueError(
                f"free {self.free_blocks}, usable {self.usable_blocks} and total "
                f"{self.total_blocks} KV blocks (one is the null block) do not fit"
            )
        counts = (self.pending_blocks, self.head_blocks, self.growth_blocks, self.headroom_bytes)
        if min(counts) < 0 or self.block_bytes < 1 or self.granule_blocks < 1:
            raise ValueError(f"negative or empty: {self}")

    @property
    def unbacked_blocks(self) -> int:
        """Blocks that the scheduler knows of and that have no memory now."""
        return self.total_blocks - 1 - self.usable_blocks

    @property
    def expected_free_blocks(self) -> int:
        """F_blk once running and waiting requests have what they need; negative when short."""
        return self.free_blocks - self.growth_blocks - self.pending_blocks


def blocks_for(tokens: Iterable[int], block_size: int) -> int:
    """Blocks that requests of these many tokens need, each rounded up on its own."""
    return sum(-(-count // block_size) for count in tokens)


@dataclass(frozen=True, eq=False)
class RequestSignals:
    """Runtime signals of one request (or of the whole batch, when kernels add it up together).

    kv_blocks:  KV blocks that it holds, its weight in the merge.
    tokens:     real tokens observed (decayed like the sums).
    mass:       float32 [L, E], sum of routing weights r by expert.
    features:   float32 [L, E, 2, 3], sum r|x|, sum r|x|^2, max |x| by block; None: no residual.
    confidence, clip: [2, T] and [2, T, 2] as in `ResidualHeads`, when this request has its own.
    """

    kv_blocks: int
    tokens: float
    mass: NDArray[np.float32]
    features: NDArray[np.float32] | None = None
    confidence: Float32 | None = None
    clip: Float32 | None = None


@dataclass(frozen=True, eq=False)
class BatchSignals:
    """Signals of the batch as one table.

    mass:       float64 [L, E], eq. 1, averaged over requests; a layer sums to 1.
    rho:        float32 [T, rows], eq. 5 averaged over requests; None: no residual, eta = 1.
    confidence: float32 [2, T]; clip: float32 [2, T, 2]; averaged. None with rho.
    """

    mass: FloatArray
    rho: Float32 | None = None
    confidence: Float32 | None = None
    clip: Float32 | None = None

    def of(self, holding: Holding, rows: IntArray) -> BatchSignals:
        """Those of a holding; `rows`: its own, int64. Mass stays relative to whole layers."""
        mass = self.mass[np.ix_(holding.layers, holding.experts)]
        rho = None if self.rho is None else np.ascontiguousarray(self.rho[:, rows])
        return BatchSignals(mass, rho, self.confidence, self.clip)


@dataclass(frozen=True, eq=False)
class Observation:
    """O_t: `step` is the scheduler's step number; `signals` None until something was routed.

    Hand the same `signals` object over while it has not changed: the planner then keeps its scores.
    kv:       of one rank.
    holdings: the same for each holding, where ranks hold different rows: blocks are counted alike,
              bytes of a block and headroom differ. Empty where all ranks hold all rows.
    """

    step: int
    kv: KVPressure
    signals: BatchSignals | None = None
    holdings: tuple[KVPressure, ...] = ()


def merge_signals(
    requests: Sequence[RequestSignals], calibration: Calibration, prior_tokens: float = 0.0
) -> BatchSignals | None:
    """Average requests' mass, residual, confidence and clip bounds by their KV blocks.

    `prior_tokens` mixes that many tokens of calibration into each request (see `Policy`). The
    residual is there only when heads and every counted request's features are. None when no
    request holds a block.
    """
    counted = [request for request in requests if request.kv_blocks > 0]
    if not counted:
        return None
    blocks = np.array([request.kv_blocks for request in counted], np.float64)
    weights = blocks / blocks.sum()
    mass = np.zeros(calibration.mass.shape, np.float64)
    for weight, request in zip(weights, counted, strict=True):
        mass += weight * routing_mass(request, calibration, prior_tokens)
    heads = calibration.heads
    if heads is None or any(request.features is None for request in counted):
        return BatchSignals(mass)
    rho = np.zeros((heads.bias.shape[1], mass.size * 2), np.float32)
    confidence, clip = np.zeros_like(heads.confidence), np.zeros_like(heads.clip)
    for weight, request in zip(weights.astype(np.float32), counted, strict=True):
        assert request.features is not None
        phi = log_features(request.features, request.tokens, heads.center, prior_tokens)
        rho += weight * predict_residual(heads, phi)
        own = request.confidence, request.clip
        confidence += weight * (heads.confidence if own[0] is None else own[0])
        clip += weight * (heads.clip if own[1] is None else own[1])
    return BatchSignals(mass, rho, confidence, clip)


def routing_mass(
    request: RequestSignals, calibration: Calibration, prior_tokens: float = 0.0
) -> FloatArray:
    """Eq. 1 of one request, float64 [L, E], with `prior_tokens` of calibration mixed in.

    A layer in which nothing was routed has the calibration's mass.
    """
    prior = calibration.mass / calibration.mass.sum(axis=1, keepdims=True)
    seen = request.mass.astype(np.float64)
    total = seen.sum(axis=1, keepdims=True)
    per_token = total / max(request.tokens, 1.0)  # routing weights need not sum to 1 a token
    mixed = seen + prior_tokens * per_token * prior
    whole = total + prior_tokens * per_token
    out: FloatArray = np.where(whole > 0, mixed / np.where(whole > 0, whole, 1.0), prior)
    return out


def decayed(previous: RequestSignals, fresh: RequestSignals, keep: float) -> RequestSignals:
    """The window of signals after one more step: `keep` (0..1) of the past and all of `fresh`.

    Sums add up; the maximum forgets at the same rate. KV blocks are those of `fresh`.
    """
    features = fresh.features
    if features is not None and previous.features is not None:
        past = previous.features * np.float32(keep)
        features = past + features
        features[..., 2] = np.maximum(past[..., 2], fresh.features[..., 2])  # type: ignore[index]
    return RequestSignals(
        kv_blocks=fresh.kv_blocks,
        tokens=previous.tokens * keep + fresh.tokens,
        mass=previous.mass * np.float32(keep) + fresh.mass,
        features=features,
        confidence=fresh.confidence,
        clip=fresh.clip,
    )
