"""A torch tensor over a GPU address, by DLPack: nothing is copied, nothing needs to be mapped yet.

torch takes the capsule's word for the device, where `__cuda_array_interface__` would ask the driver
about the address, which knows nothing of reserved addresses without memory.
Structures as in dlpack.h (DLPack 0.8: DLManagedTensor).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_CUDA = 2  # kDLCUDA
_INT = 0  # kDLInt


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor; without a deleter, as the memory belongs to the device object."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

_NAME = b"dltensor"
_kept: list[Any] = []  # what capsules point to: a few hundred bytes a tensor, for good


def tensor_at(address: int, nbytes: int, ordinal: int) -> torch.Tensor:
    """int8 [nbytes] on CUDA device `ordinal` at `address`."""
    import torch

    shape = (ctypes.c_int64 * 1)(nbytes)
    managed = _Managed()
    managed.tensor = _Tensor(address, _CUDA, ordinal, 1, _INT, 8, 1, shape, None, 0)
    _kept.append((managed, shape))
    capsule = _new_capsule(ctypes.addressof(managed), _NAME, None)
    found: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule)
    return found
