"""The process's expert store: planes and tables at fixed precision, and the table of addresses.

One store for each model folder in a process. `load` copies one layer's part of the checkpoint to
the device, at the bits of the plan and not one plane more.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from pagedweight.checkpoint.reader import Checkpoint
from pagedweight.core.geometry import KINDS
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
        state = LayerState(
            get_kernel(device.type),
            shape,
            BlockTable.empty(shape.experts, "cpu"),
            getattr(torch, checkpoint.table_dtype),
            activation,
        )
        layer = checkpoint.layer(position)
        for slot, expert in enumerate(part.experts):
            for kind, name in enumerate(KINDS):
                bits = int(self.plan[position, expert, kind])
                planes = part_of(layer.planes[name][:bits, expert], checkpoint.shape, kind, part)
                table = part_of(layer.tables[name][bits][expert], checkpoint.shape, kind, part)
                self._place(state, slot, kind, bits, planes, table, device)
        state.table = BlockTable(
            state.table.bits.to(device),
            state.table.planes.to(device),
            state.table.tables.to(device),
        )
        return state

    def _place(
        self,
        state: LayerState,
        slot: int,
        kind: int,
        bits: int,
        planes: np.ndarray,
        table: np.ndarray,
        device: torch.device,
    ) -> None:
        on_device = torch.from_numpy(planes.view(np.int32).copy()).to(device)
        centroids = torch.from_numpy(table.view(np.int16).copy()).to(device)
        state.memory += [on_device, centroids]
        step = on_device[0].numel() * on_device.element_size()
        state.table.bits[slot, kind] = bits
        for plane in range(bits):
            state.table.planes[slot, kind, plane] = on_device.data_ptr() + plane * step
        state.table.tables[slot, kind] = centroids.data_ptr()


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
