"""Scratch memory of one device: grows to the largest call and never moves what a graph may hold."""

from __future__ import annotations

import torch


class Workspace:
    """Named buffers on a device.

    A captured graph keeps raw addresses, so a buffer that was outgrown is kept, not freed. Contents
    are undefined, but for buffers made with `zeroed`. One call at a time: launches on one stream,
    or on streams that wait for each other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def address(self, name: str, size: int, zeroed: bool = False) -> int:
        """Address of `size` bytes, aligned to 256."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            if zeroed and torch.cuda.is_current_stream_capturing():
                # The zeros would be written by replays of this graph, and by nothing before them.
                raise RuntimeError("the CUDA kernel's first call must not be in a graph capture")
            if buffer is not None:
                self._outgrown.append(buffer)
            make = torch.zeros if zeroed else torch.empty
            buffer = make(max(size, 256), dtype=torch.uint8, device=self._device)
            self._buffers[name] = buffer
        return buffer.data_ptr()

    def fill(self, value: int) -> None:
        """Overwrite every scratch buffer but the zeroed ones with a byte: for tests."""
        for name, buffer in self._buffers.items():
            if name != "counters":
                buffer.fill_(value)
