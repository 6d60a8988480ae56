"""The process's expert store: planes and tables at fixed precision, and the table of addresses.

One store for each model folder in a process. `load` copies one layer's part of the checkpoint to
the device, at the bits of the plan and not one plane more: a plane of all experts that need it at a
time, so that a layer is some twenty large copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import KINDS, MAX_BITS
from pagedweight.kernels.contract import Activation, BlockTable
from pagedweight.serving.kernel import get_kernel
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.parts import Part, part_of
from pagedweight.serving.plans import plan_of
from pagedweight.serving.state import LayerState

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ExpertStore(Protocol):
    """Where layers get their experts from while vLLM builds the model."""

    def load(
        self, decoder_layer: int, part: Part, activation: Activation, device: torch.device
    ) -> LayerState:
        """This process's part of one layer; CheckpointError when the checkpoint has no such
        layer."""
        ...


class StaticStore:
    """Static precision: every linear block at the bits of `plan` [L, E, 2] for good."""

    def __init__(self, checkpoint: Checkpoint, plan: np.ndarray):
        self.checkpoint = checkpoint
        self.plan = plan

    def load(
        self, decoder_layer: int, part: Part, activation: Activation, device: torch.device
    ) -> LayerState:
        """Copy one layer's part to `device`; CheckpointError when it holds no such layer."""
        checkpoint = self.checkpoint
        position = checkpoint.position(decoder_layer)
        shape = part.shape(checkpoint.shape)
        # numpy until the end: vLLM builds models with the GPU as torch's default device.
        table = BlockRows.empty(shape.experts)
        memory: list[torch.Tensor] = []
        layer = checkpoint.layer(position)
        for kind, name in enumerate(KINDS):
            bits = self.plan[position, list(part.experts), kind]
            table.bits[:, kind] = bits
            for plane in range(int(bits.max())):
                slots = np.flatnonzero(bits > plane)
                stored = _of_experts(layer.planes[name][plane], part.experts, slots)
                memory.append(_upload(part_of(stored, checkpoint.shape, kind, part), device))
                table.planes[slots, kind, plane] = _addresses(memory[-1])
            for level in np.unique(bits).tolist():
                slots = np.flatnonzero(bits == level)
                stored = _of_experts(layer.tables[name][level], part.experts, slots)
                memory.append(_upload(part_of(stored, checkpoint.shape, kind, part), device))
                table.tables[slots, kind] = _addresses(memory[-1])
        return LayerState(
            get_kernel(device.type),
            shape,
            table.upload(device),
            getattr(torch, checkpoint.table_dtype),
            activation,
            memory=memory,
        )


@dataclass(frozen=True)
class BlockRows:
    """A `BlockTable` while it is filled on the host."""

    bits: np.ndarray
    planes: np.ndarray
    tables: np.ndarray

    @staticmethod
    def empty(experts: int) -> BlockRows:
        bits = np.zeros((experts, len(KINDS)), np.int32)
        planes = np.zeros((experts, len(KINDS), MAX_BITS), np.int64)
        return BlockRows(bits, planes, planes[:, :, 0].copy())

    def upload(self, device: torch.device) -> BlockTable:
        """The table where the kernel reads it."""
        arrays = (self.bits, self.planes, self.tables)
        return BlockTable(*(torch.from_numpy(array).to(device) for array in arrays))


def _of_experts(stored: np.ndarray, experts: tuple[int, ...], slots: np.ndarray) -> np.ndarray:
    """Rows of `stored` [E, ...] of the experts in `slots`; a view where that is all of them."""
    chosen = np.asarray(experts)[slots]
    return stored if np.array_equal(chosen, np.arange(len(stored))) else stored[chosen]


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on `device` of raw words; `array` may be a read-only mapping."""
    signed = np.int32 if array.itemsize == 4 else np.int16
    return torch.from_numpy(array.view(signed).copy()).to(device)


def _addresses(uploaded: torch.Tensor) -> np.ndarray:
    """int64 [n]: where each of the n leading entries starts."""
    step = uploaded[0].numel() * uploaded.element_size()
    return uploaded.data_ptr() + step * np.arange(len(uploaded))


@lru_cache(maxsize=4)
def _open(path: str, options: ServeOptions) -> ExpertStore:
    checkpoint = Checkpoint.open(path)
    if options.budgeted:
        from pagedweight.serving.elastic.store import ElasticStore

        return ElasticStore(checkpoint, options)
    return StaticStore(checkpoint, plan_of(checkpoint, options))


def expert_store(config: VllmConfig) -> ExpertStore:
    """The store of the model that vLLM is building in this process."""
    return _open(config.model_config.model, ServeOptions.of(config.additional_config))
