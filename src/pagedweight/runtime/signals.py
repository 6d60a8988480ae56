"""Runtime signals from kernels to planner: taken from a rank's accumulators, decayed over a window.

Kernels add routing mass and input-norm features into `LayerStats` as they run. A rank takes them
once a step into its report; the scheduler keeps a decayed sum and, every few steps, turns it into
the one table that the planner reads (the batch is one request: kernels do not know requests).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pagedweight.core.calibration import Calibration
from pagedweight.core.holdings import Holdings
from pagedweight.core.observation import BatchSignals, RequestSignals, decayed, merge_signals
from pagedweight.kernels.contract import FEATURES, LayerStats
from pagedweight.runtime.messages import Signals, WorkerReport


def take_signals(stats: Sequence[LayerStats]) -> Signals:
    """Sums of all layers since the last call; the accumulators start again from zero."""
    taken = Signals(
        mass=np.stack([layer.mass.cpu().numpy() for layer in stats]),
        tokens=np.stack([layer.tokens.cpu().numpy() for layer in stats]),
        features=np.stack([layer.features.cpu().numpy() for layer in stats]),
    )
    for layer in stats:
        layer.mass.zero_()
        layer.tokens.zero_()
        layer.features.zero_()
    return taken


def whole_signals(report: WorkerReport, holdings: Holdings) -> Signals | None:
    """The model's signals out of those of its holdings; None unless all of them are there."""
    found = {holdings.of_rank(one.rank): one.signals for one in report.pages if one.signals}
    if len(found) < holdings.count:
        return None
    if holdings.count == 1:
        return found[0]
    layers, experts, kinds = holdings.index.shape
    whole = Signals(
        np.zeros((layers, experts), np.float32),
        np.zeros((layers, experts), np.float32),
        np.zeros((layers, experts, kinds, FEATURES), np.float32),
    )
    for number, part in enumerate(holdings.parts):
        grid = np.ix_(part.layers, part.experts)
        whole.mass[grid] = found[number].mass
        whole.tokens[grid] = found[number].tokens
        whole.features[grid] = found[number].features
    return whole


class RankStats:
    """Accumulators of all layers in one buffer, so that a GPU's are read by one copy.

    `layers[l]` is what layer l's kernel adds to; the buffer never moves.
    """

    def __init__(self, layers: int, experts: int, device: torch.device | str) -> None:
        self._experts = experts
        self._sums = torch.zeros((layers, (2 + 2 * FEATURES) * experts), device=device)
        self.layers = tuple(self._views(sums) for sums in self._sums)
        self._arriving: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def _views(self, sums: torch.Tensor) -> LayerStats:
        experts = self._experts
        features = sums[2 * experts :].view(experts, 2, FEATURES)
        return LayerStats(sums[:experts], sums[experts : 2 * experts], features)

    def forget(self) -> None:
        """In order: start again from zero, and drop what is on its way."""
        self._sums.zero_()
        self._arriving = None

    def take(self) -> Signals | None:
        """Signals of an earlier step, None while they are on their way; the GPU is not waited for.

        In order behind the steps submitted so far, the sums are copied to pinned memory and start
        again from zero; a later call returns them.
        """
        if self._arriving is not None and not self._arriving[1].query():
            return None
        arrived = None if self._arriving is None else self._signals(self._arriving[0].numpy())
        host = (
            torch.empty_like(self._sums, device="cpu", pin_memory=True)
            if self._arriving is None
            else self._arriving[0]
        )
        host.copy_(self._sums, non_blocking=True)
        self._sums.zero_()
        event = torch.cuda.Event()
        event.record()
        self._arriving = (host, event)
        return arrived

    def _signals(self, sums: np.ndarray) -> Signals:
        """A copy: `sums` is written again by the next call."""
        experts = self._experts
        features = sums[:, 2 * experts :].reshape(-1, experts, 2, FEATURES)
        return Signals(
            sums[:, :experts].copy(), sums[:, experts : 2 * experts].copy(), features.copy()
        )


class SignalWindow:
    """Decayed signals of the whole batch.

    keep: share of the past that a step keeps (0.98: about the last 50 steps).
    refresh_steps: steps between two tables; the planner keeps its scores while the table stays.
    """

    def __init__(
        self,
        calibration: Calibration,
        top_k: int,
        prior_tokens: float,
        keep: float = 0.98,
        refresh_steps: int = 16,
    ) -> None:
        self._calibration = calibration
        self._top_k = top_k
        self._prior_tokens = prior_tokens
        self._keep = keep
        self._refresh_steps = refresh_steps
        self._sums: RequestSignals | None = None
        self._table: BatchSignals | None = None
        self._made_at: int | None = None

    def add(self, signals: Signals) -> None:
        """One step's signals; a step in which nothing was routed leaves the window as it is."""
        tokens = float(signals.tokens.sum(axis=1).max()) / self._top_k
        if tokens == 0:
            return
        fresh = RequestSignals(1, tokens, signals.mass, signals.features)
        self._sums = fresh if self._sums is None else decayed(self._sums, fresh, self._keep)

    def current(self, step: int) -> BatchSignals | None:
        """The table to plan step `step` with; None until something was routed."""
        old = self._made_at is None or step - self._made_at >= self._refresh_steps
        if self._sums is not None and old:
            self._table = merge_signals([self._sums], self._calibration, self._prior_tokens)
            self._made_at = step
        return self._table
