"""What the kernel needs of one layer in this process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pagedweight.core.geometry import LayerShape
from pagedweight.kernels.contract import Activation, BlockTable, LayerStats, MoEKernel
from pagedweight.serving.two_levels import TwoLevels


@dataclass
class LayerState:
    """Arguments of `MoEKernel` that stay from call to call; `memory` owns what `table` points to
    (empty when somebody else does). higher: a second level, which some of the tokens read."""

    kernel: MoEKernel
    shape: LayerShape
    table: BlockTable
    table_dtype: torch.dtype
    activation: Activation
    stats: LayerStats | None = None
    num_tokens: torch.Tensor | None = None
    memory: list[torch.Tensor] = field(default_factory=list)
    higher: TwoLevels | None = None
