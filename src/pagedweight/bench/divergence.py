"""How far from the source were the models that wrote these answers? Mean KL of what was generated.

Teacher-forced: source and dequantized model read prompt and answer, and are compared at the
positions that predict the answer's tokens. Where bits changed while a server ran, a token counts at
the bits in force when it was written. That is by slices of time: tokens are cut into `slices` equal
parts by the time they came at, and each part is judged at the bits of its middle. (The KV cache of
such an answer was written at several bits; here all of it is at those of the slice.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedweight.bench.client import Answer
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import KINDS
from pagedweight.eval.reference import ReferenceModel, load_quantized
from pagedweight.runtime.timeline import Timeline
from pagedweight.runtime.trace import BitTrace

Plan = NDArray[np.int8]
"""Bits [L, E, 2]."""
BitsAt = Callable[[float], Plan]
"""The bits in force at a monotonic time."""
_SAME = 6e-4
"""Mean bits that a timeline has rounded are those of a trace's state within this."""
_AHEAD = 8
"""States of a trace that one line of a timeline may step over."""


@dataclass(frozen=True)
class Written:
    """An answer as tokens. times: of each generated token, the last len(times) of `tokens`."""

    tokens: torch.Tensor
    times: NDArray[np.float64]

    @staticmethod
    def of(answer: Answer, encode: Callable[[str], list[int]]) -> Written:
        """The text encoded again; tokens share its arrivals in order."""
        generated = encode(answer.text)
        spread = np.linspace(0, len(answer.arrivals) - 1, len(generated)).round().astype(int)
        tokens = torch.tensor([*answer.ask.prompt, *generated], dtype=torch.int64)
        return Written(tokens, np.array(answer.arrivals)[spread])


def mean_kl(
    source: ReferenceModel,
    checkpoint: Checkpoint,
    written: Sequence[Written],
    bits_at: BitsAt,
    slices: int = 1,
) -> float:
    """Mean over all generated tokens of KL(source || checkpoint at its bits), nats."""
    all_times = np.sort(np.concatenate([one.times for one in written]))
    parts = np.array_split(all_times, slices)
    truths = [_log_p(source, one) for one in written]
    total = 0.0
    for number, part in enumerate(parts):
        plan = bits_at(float(part[len(part) // 2]))
        model = load_quantized(checkpoint, plan, torch.float32, torch.device("cpu"))
        end = parts[number + 1][0] if number + 1 < len(parts) else np.inf
        for one, truth in zip(written, truths, strict=True):
            inside = torch.from_numpy((one.times >= part[0]) & (one.times < end))
            if inside.any():
                log_q = _log_p(model, one)[inside]
                log_p = truth[inside]
                total += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
    return total / len(all_times)


def _log_p(model: ReferenceModel, one: Written) -> torch.Tensor:
    """Log-probabilities that predict each generated token, float32 [generated, V]."""
    logits = model.logits(one.tokens)[-len(one.times) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)


def traced_bits(checkpoint: Checkpoint, timeline: Timeline, trace: BitTrace) -> BitsAt:
    """The bits in force by time, from what one server wrote: when (timeline) and which (trace).

    A trace counts model steps and has no clock; a timeline has the mean bits by time. Both go
    through the same states in the same order, so the timeline's next mean finds the trace's state;
    while a server is idle the trace has only the last.
    """
    plans = list(_states(checkpoint, trace))
    means = np.array([mean_bits(checkpoint, plan) for plan in plans])
    state, states = 0, []
    for mean in timeline.column("bits"):
        same = np.flatnonzero(np.abs(means[state : state + _AHEAD] - mean) < _SAME)
        state += int(same[0]) if same.size else 0
        states.append(state)
    times = timeline.column("monotonic")

    def bits_at(time: float) -> Plan:
        sample = int(np.searchsorted(times, time, side="right")) - 1
        return plans[states[max(sample, 0)]]

    return bits_at


def _states(checkpoint: Checkpoint, trace: BitTrace) -> list[Plan]:
    shape = (len(checkpoint.moe_layers), checkpoint.shape.experts, len(KINDS))
    now = np.full(np.prod(shape), checkpoint.bits[-1], np.int8)
    found = []
    for _, (rows, bits) in sorted(trace.changes.items()):
        now[list(rows)] = bits
        found.append(now.reshape(shape).copy())
    return found or [now.reshape(shape)]


def mean_bits(checkpoint: Checkpoint, plan: Plan) -> float:
    """Mean over weights, not over blocks."""
    weights = [block.rows * block.cols for block in checkpoint.shape.blocks]
    return float(np.average(plan.mean(axis=(0, 1)), weights=weights))
