"""One pass over the calibration text, forward and backward, a decoder layer at a time.

Forward keeps every layer's input and adds up moments and runtime signals; backward runs each layer
again from its input and turns activation gradients into sensitivities. Weights never have
gradients. On the device: one decoder layer (or the head), one linear block at all levels, the
routed vectors of one layer up to HOLD_BYTES. The inputs of all layers, float32 [sequences, T, H]
each, are in memory or, when large, in files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagedweight.calibrate.buffer import ActivationBuffer
from pagedweight.calibrate.experts import ExpertCall, Experts, read_experts, run_experts
from pagedweight.calibrate.head import HeadLoss, Labels
from pagedweight.calibrate.levels import LevelErrors
from pagedweight.calibrate.measurements import SEGMENTS, Measurements
from pagedweight.calibrate.moments import LayerMoments, MomentSums
from pagedweight.calibrate.segments import SegmentSignals, segment_lengths
from pagedweight.calibrate.sensitivity import LayerSensitivity, Method
from pagedweight.calibrate.stream import StreamedModel
from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.checkpoint.source import SourceCheckpoint
from pagedweight.core.geometry import KINDS

Arrays = dict[str, npt.NDArray[Any]]
Report = Callable[[str, int, int], None]
"""(stage, steps done since the last call, steps in all): stages "forward", "backward"; a step is
one sequence through one layer."""


@dataclass(frozen=True)
class MeasureOptions:
    """method and labels as in `sensitivity` and `head`; seed: of drawn labels."""

    method: Method = "per-token"
    labels: Labels = "model"
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True, eq=False)
class Measured:
    """arrays: tokens, mass, second_moment.*, error and sensitivity as in docs/format.md.
    perplexity: of the source on the text."""

    arrays: Arrays
    measurements: Measurements
    perplexity: float


def measure(
    source: SourceCheckpoint,
    checkpoint: Checkpoint,
    tokens: torch.Tensor,
    options: MeasureOptions,
    scratch: Path,
    report: Report,
) -> Measured:
    """Measure on tokens, int64 [sequences, T]. `scratch`: folder for large buffers."""
    run = _Pass(source, checkpoint, tokens, options, scratch, report)
    run.forward()
    nll = run.head()
    run.backward()
    return Measured(run.arrays(), run.measurements(), math.exp(nll))


class _Pass:
    """The state of one run. Per layer results are by decoder layer number."""

    def __init__(
        self,
        source: SourceCheckpoint,
        checkpoint: Checkpoint,
        tokens: torch.Tensor,
        options: MeasureOptions,
        scratch: Path,
        report: Report,
    ) -> None:
        self.source, self.checkpoint, self.tokens = source, checkpoint, tokens
        self.options, self.report = options, report
        self.device = torch.device(options.device)
        self.model = StreamedModel(source, self.device)
        size, count = (*tokens.shape, source.shape.hidden), source.num_hidden_layers + 1
        self.inputs = [ActivationBuffer(size, scratch, count) for _ in range(count)]
        self.moments: dict[int, LayerMoments] = {}
        self.signals: dict[int, SegmentSignals] = {}
        self.damage: dict[int, LayerSensitivity] = {}
        self.error: dict[int, npt.NDArray[np.float32]] = {}

    def forward(self) -> None:
        """All layers in order: their inputs, moments and signals."""
        for number, hidden in enumerate(self.model.embed(self.tokens)):
            self.inputs[0].write(number, hidden)
        for layer in range(self.source.num_hidden_layers):
            sums = MomentSums(self.source.shape, self.device)
            signals = SegmentSignals(self.source.shape, *self.tokens.shape, self.device)
            self.model.load(layer, self._experts(layer, both(sums.visit, signals.visit)))
            for number in range(len(self.tokens)):
                signals.sequence = number
                hidden = self.model.run(self.inputs[layer].read(number))
                self.inputs[layer + 1].write(number, hidden)
                self.report("forward", 1, len(self.tokens) * self.source.num_hidden_layers)
            self.model.drop(layer)
            if layer in self.source.moe_layers:
                self.moments[layer], self.signals[layer] = sums.moments(), signals

    def head(self) -> float:
        """Replace the last layer's outputs by the loss's gradient; the text's mean NLL."""
        loss = HeadLoss(self.model, self.options.labels, self.options.seed)
        self.model.load_head()
        for number, tokens in enumerate(self.tokens):
            gradient = loss.gradient(self.inputs[-1].read(number), tokens)
            self.inputs[-1].write(number, gradient)
            self.report("head", 1, len(self.tokens))
        self.model.drop_head()
        sequences, length = self.tokens.shape
        return loss.nll / (sequences * (length - 1))

    def backward(self) -> None:
        """Layers from the last down to the first that has experts: their sensitivities."""
        gradients, first = self.inputs.pop(), self.source.moe_layers[0]
        total = len(self.tokens) * (self.source.num_hidden_layers - first)
        for layer in range(self.source.num_hidden_layers - 1, first - 1, -1):
            inputs, damage = self.inputs.pop(), None
            if layer in self.source.moe_layers:
                self.damage[layer] = damage = self._sensitivity(layer)
            self.model.load(layer, self._experts(layer, damage.visit) if damage else None)
            for number in range(len(self.tokens)):
                gradient = gradients.read(number).to(self.device)
                gradients.write(number, self.model.pull_back(inputs.read(number), gradient))
                if damage:
                    damage.end_sequence()
                self.report("backward", 1, total)
            self.model.drop(layer)
            if damage:
                self.error[layer] = damage.close(self.moments[layer].second_moment)

    def _experts(self, layer: int, visit: Callable[[ExpertCall], None]) -> Experts | None:
        """The layer's experts, read from the source; None where it has none."""
        if layer not in self.source.moe_layers:
            return None
        position = self.source.moe_layers.index(layer)
        weights = read_experts(self.source, position, self.device)
        self._errors = LevelErrors(self.checkpoint, position, weights)
        return run_experts(weights, self.source.activation, visit)

    def _sensitivity(self, layer: int) -> LayerSensitivity:
        return LayerSensitivity(
            self.source.shape,
            len(self.checkpoint.bits),
            *self.tokens.shape,
            self.options.method,
            lambda expert, kind: self._errors(expert, kind),
            self.device,
        )

    def arrays(self) -> Arrays:
        """The tensors of calibration.safetensors, without residual heads."""
        layers = self.source.moe_layers
        moments = [self.moments[layer] for layer in layers]
        total = torch.stack([self.damage[layer].total for layer in layers])
        return {
            "tokens": np.stack([one.tokens for one in moments]),
            "mass": np.stack([one.mass for one in moments]),
            **{
                f"second_moment.{kind}": np.stack([one.second_moment[kind] for one in moments])
                for kind in KINDS
            },
            "error": np.stack([self.error[layer] for layer in layers]),
            "sensitivity": total.float().cpu().numpy(),
        }

    def measurements(self) -> Measurements:
        """Signals and damage by segment."""
        sequences, length = self.tokens.shape

        def by_segment(parts: list[torch.Tensor]) -> npt.NDArray[Any]:
            whole = torch.stack(parts, dim=1).cpu().numpy()
            return whole.reshape(sequences, SEGMENTS, *whole.shape[1:])

        layers = self.source.moe_layers
        signals = [self.signals[layer] for layer in layers]
        return Measurements(
            length=np.tile(segment_lengths(length), (sequences, 1)),
            routed=by_segment([one.routed for one in signals]),
            mass=by_segment([one.mass for one in signals]),
            features=by_segment([one.features for one in signals]),
            damage=by_segment([self.damage[layer].by_segment for layer in layers]),
        )


def both(*visits: Callable[[ExpertCall], None]) -> Callable[[ExpertCall], None]:
    """One visitor that is all of `visits`."""

    def visit(call: ExpertCall) -> None:
        for one in visits:
            one(call)

    return visit
