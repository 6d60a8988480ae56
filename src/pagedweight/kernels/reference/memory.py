"""Raw addresses as tensors, without a copy: how the reference reads what a `BlockTable` points at.

The caller keeps the memory alive and mapped for as long as it uses the tensor.
"""

from __future__ import annotations

import ctypes
import math

import torch


class _CudaBytes:
    """`size` bytes of device memory, in the form that `torch.as_tensor` takes without copying."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor over the memory at `address`, on a CPU or CUDA `device`."""
    size = math.prod(shape) * dtype.itemsize
    if device.type == "cuda":
        raw = torch.as_tensor(_CudaBytes(address, size), device=device)
    else:
        raw = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)
