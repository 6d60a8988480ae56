"""What every MoE kernel is given and must return; CPU, CUDA and the reference keep to it.

A kernel reads bit-planes and lookup tables through raw addresses in a table of its own, so that a
precision change is one small write and never a new tensor. Addresses are host or device pointers
according to where `x` lives. The table's storage stays at a fixed address for the life of the
server: CUDA graphs captured once stay valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from pagedweight.core.geometry import MAX_BITS, LayerShape

Activation = Literal["silu", "gelu", "gelu_tanh"]
FEATURES = 3
"""Input-norm features for each linear block: sum r|x|, sum r|x|^2, max |x| (paper, eq. 5)."""


@dataclass(frozen=True)
class BlockTable:
    """One layer's rows of the device table (DESIGN decision 5). E experts, kinds gate_up, down.

    bits:   int32 [E, 2], committed bits q_i in 2..8 (what the kernel reads now).
    planes: int64 [E, 2, 8], address of plane p (0 = most significant); only the first q_i are read,
            the others may hold anything.
    tables: int64 [E, 2], address of the table for exactly q_i bits: [padded rows, 2^q_i] centroids.
    """

    bits: torch.Tensor
    planes: torch.Tensor
    tables: torch.Tensor

    @staticmethod
    def empty(experts: int, device: torch.device | str = "cpu") -> BlockTable:
        """A zeroed table for `experts` experts."""
        return BlockTable(
            bits=torch.zeros((experts, 2), dtype=torch.int32, device=device),
            planes=torch.zeros((experts, 2, MAX_BITS), dtype=torch.int64, device=device),
            tables=torch.zeros((experts, 2), dtype=torch.int64, device=device),
        )


@dataclass(frozen=True)
class LayerStats:
    """Runtime signals that a kernel adds up in the same pass (paper eqs. 1 and 5), all float32.

    mass:     [E], sum of routing weights r over real tokens.
    tokens:   [E], number of (token, choice) pairs of real tokens.
    features: [E, 2, 3] by kind: sum r|x|, sum r|x|^2, max |x| of the block's input vectors, with
              |x| the Euclidean norm in float32. The sums are added to, the maximum is raised.
    """

    mass: torch.Tensor
    tokens: torch.Tensor
    features: torch.Tensor

    @staticmethod
    def empty(experts: int, device: torch.device | str = "cpu") -> LayerStats:
        """Zeroed statistics for `experts` experts."""
        return LayerStats(
            mass=torch.zeros(experts, dtype=torch.float32, device=device),
            tokens=torch.zeros(experts, dtype=torch.float32, device=device),
            features=torch.zeros((experts, 2, FEATURES), dtype=torch.float32, device=device),
        )


class MoEKernel(Protocol):
    """Routed tokens to expert outputs, planes and tables read directly.

    x:            [T, H] bfloat16, float16 or float32, contiguous.
    topk_weights: [T, k] float32 routing weights r.
    topk_ids:     [T, k] int32 or int64 local expert ids; a negative id is an expert of another rank
                  and adds nothing.
    shape:        experts, H and I of this layer (this rank's part).
    table:        see `BlockTable`.
    table_dtype:  torch.float16 or torch.bfloat16, type of the centroids.
    activation:   of the gate half: out = down(act(gate) * up).
    out:          [T, H] of x's dtype, written whole (rows of tokens without an expert become zero).
    stats:        None, or accumulators to add this call's real tokens to.
    num_tokens:   None, or an int64 [1] tensor: tokens at and beyond it are graph padding; they are
                  computed like the others but left out of `stats`.
    beside:       other work of this layer, a shared expert, runs on a second stream meanwhile; a
                  kernel may leave it room. Changes no result.

    Sums are in float32; `act(gate) * up` is rounded once to x's dtype between the two linear
    blocks, and the weighted sum over choices once at the end. The order of additions depends on
    nothing but the shapes, on how many tokens each expert has, and on the committed bits of the
    experts that the call's tokens reach: the same inputs give the same bits, and what lies in
    padding never shows.
    """

    def __call__(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shape: LayerShape,
        table: BlockTable,
        table_dtype: torch.dtype,
        activation: Activation,
        out: torch.Tensor,
        stats: LayerStats | None = None,
        num_tokens: torch.Tensor | None = None,
        beside: bool = False,
    ) -> None: ...
