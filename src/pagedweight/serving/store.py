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
from pagedweight.core.policies import Assignment
from pagedweight.kernels.contract import Activation, BlockTable
from pagedweight.serving.kernel import get_kernel
from pagedweight.serving.options import ServeOptions
from pagedweight.serving.parts import Part, part_of
from pagedweight.serving.plans import assignment_of
from pagedweight.serving.state import LayerState
from pagedweight.serving.two_levels import WINDOW, TwoLevels

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
    """Static precision: every linear block at the bits of `assignment` for good."""

    def __init__(self, checkpoint: Checkpoint, assignment: Assignment):
        self.checkpoint = checkpoint
        self.assignment = assignment

    def load(
        self, decoder_layer: int, part: Part, activation: Activation, device: torch.device
    ) -> LayerState:
        """Copy one layer's part to `device`; CheckpointError when it holds no such layer."""
        checkpoint = self.checkpoint
        position = checkpoint.position(decoder_layer)
        shape = part.shape(checkpoint.shape)
        low, high = self.assignment.bits, self.assignment.high
        plans = [plan[position, list(part.experts)] for plan in (low, high) if plan is not None]
        tables, memory = self._bring_in(position, part, plans, device)
        higher = None
        if high is not None:
            error = torch.from_numpy(self._error_of_down(position, part, plans[0])).to(device)
            recent = torch.zeros(WINDOW, device=device)
            higher = TwoLevels(tables[1], self.assignment.share, error, recent)
        return LayerState(
            get_kernel(device.type),
            shape,
            tables[0],
            getattr(torch, checkpoint.table_dtype),
            activation,
            memory=memory,
            higher=higher,
        )

    def _bring_in(
        self, position: int, part: Part, plans: list[np.ndarray], device: torch.device
    ) -> tuple[list[BlockTable], list[torch.Tensor]]:
        """A table for each plan [experts, kinds], and the memory that they point to: the planes of
        the highest bits once, and every plan's lookup tables."""
        # numpy until the end: vLLM builds models with the GPU as torch's default device.
        rows = [BlockRows.empty(len(part.experts)) for _ in plans]
        memory: list[torch.Tensor] = []
        layer, whole = self.checkpoint.layer(position), self.checkpoint.shape
        for kind, name in enumerate(KINDS):
            most = np.max([bits[:, kind] for bits in plans], axis=0)
            for plane in range(int(most.max())):
                slots = np.flatnonzero(most > plane)
                stored = _of_experts(layer.planes[name][plane], part.experts, slots)
                memory.append(_upload(part_of(stored, whole, kind, part), device))
                for table in rows:
                    table.planes[slots, kind, plane] = _addresses(memory[-1])
            for table, bits in zip(rows, plans, strict=True):
                table.bits[:, kind] = bits[:, kind]
                for level in np.unique(bits[:, kind]).tolist():
                    slots = np.flatnonzero(bits[:, kind] == level)
                    stored = _of_experts(layer.tables[name][level], part.experts, slots)
                    memory.append(_upload(part_of(stored, whole, kind, part), device))
                    table.tables[slots, kind] = _addresses(memory[-1])
        return [table.upload(device) for table in rows], memory

    def _error_of_down(self, position: int, part: Part, bits: np.ndarray) -> np.ndarray:
        """float32 [experts]: calibration's error of down at `bits` [experts, kinds]."""
        down = KINDS.index("down")
        error = self.checkpoint.calibration().error[position, list(part.experts), down]
        levels = bits[:, down, None].astype(np.int64) - self.checkpoint.bits[0]
        return np.take_along_axis(error, levels, 1)[:, 0].astype(np.float32)


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
    return StaticStore(checkpoint, assignment_of(checkpoint, options))


def expert_store(config: VllmConfig) -> ExpertStore:
    """The store of the model that vLLM is building in this process."""
    return _open(config.model_config.model, ServeOptions.of(config.additional_config))
