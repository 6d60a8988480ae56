"""Which tokens read the higher of two levels: the policy `dynamic-layer` inside the engine.

DP-LLM's kind of choice: in every layer and step, from an estimate of what the lower level would do
to this token's output. Both levels' tables are resident and share their planes; a token's experts
are computed once, at one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagedweight.kernels.contract import BlockTable

WINDOW = 256
"""Tokens among which the share is met: those of a call, or the latest so many of the layer."""


@dataclass(eq=False)
class TwoLevels:
    """One layer's second level.

    table: of the higher level. share: part of the tokens that read it. error: float32 [E], expected
    squared error of down at the lower level, per unit of its input. recent: float32 [WINDOW], the
    latest tokens' estimates, the oldest first; 0 where there was none yet.
    """

    table: BlockTable
    share: float
    error: torch.Tensor
    recent: torch.Tensor

    def choose(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """bool [T]: the tokens whose estimate is among the `share` largest.

        x [T, H]; topk_weights float32 [T, k]; topk_ids [T, k]. Estimate of a token's squared error:
        |x|^2 sum_k r_k^2 error(e_k). A call of WINDOW tokens and more is cut by its own estimates,
        a smaller one by the latest WINDOW, its own among them: one token a step has a choice, too.
        No value comes to the host.
        """
        harm = (topk_weights.float().square() * self.error[topk_ids.long()]).sum(1)
        estimate = x.float().square().sum(1) * harm
        latest = torch.cat([self.recent, estimate])[-WINDOW:]
        among = estimate if len(estimate) >= WINDOW else latest
        self.recent.copy_(latest)
        count = (self.share * (among > 0).sum()).round().long()
        ordered = among.sort(descending=True).values
        least = ordered[(count - 1).clamp(min=0)]
        return (estimate >= least) & (count > 0)
