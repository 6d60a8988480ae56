"""Runtime signals from kernels to planner: taken from a rank's accumulators, decayed over a window.

Kernels add routing mass and input-norm features into `LayerStats` as they run. A rank takes them
once a step into its report; the scheduler keeps a decayed sum and, every few steps, turns it into
the one table that the planner reads (the batch is one request: kernels do not know requests).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedweight.core.calibration import Calibration
from pagedweight.core.observation import BatchSignals, RequestSignals, decayed, merge_signals
from pagedweight.kernels.contract import LayerStats
from pagedweight.runtime.messages import Signals


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
