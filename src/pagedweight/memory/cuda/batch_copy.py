"""Many copies with one driver call: cuMemcpyBatchAsync on plain arrays of addresses.

A batch of rows is a thousand pieces of half a megabyte; one call each costs the host several
microseconds a piece, and the host is what decoding must not wait for. The call is looked up with
`cuGetProcAddress` in its CUDA 13.0 form and called on the arrays as they are; drivers before 13.0
get one `cuMemcpyAsync` a piece.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pagedweight.core.size_table import IntArray
from pagedweight.memory.cuda.driver import check

SINCE = 13000
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: order of the reads, location hints (type, id), flags."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_Call = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_void_p,
)


class BatchCopy:
    """Copies between addresses of any kind, on a stream that is not the legacy default one."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._attributes = _Attributes(order=_STREAM_ORDER, flags=_BESIDE_COMPUTE)
        self._from_first = ctypes.c_size_t(0)
        self._call = self._look_up()

    @property
    def batched(self) -> bool:
        """Whether this driver takes many copies in one call."""
        return self._call is not None

    def _look_up(self) -> Any:
        version = int(check(self._driver.cuDriverGetVersion(), "the driver's version"))
        if version < SINCE:
            return None
        what = "the address of cuMemcpyBatchAsync"
        address, _ = check(self._driver.cuGetProcAddress(b"cuMemcpyBatchAsync", SINCE, 0), what)
        return _Call(address)

    def submit(self, targets: IntArray, sources: IntArray, nbytes: IntArray, stream: int) -> None:
        """Copy nbytes[i] from sources[i] to targets[i], in any order among themselves.

        Raises Transient; how many were submitted before is not known then.
        """
        count = len(targets)
        if not count:
            return
        if self._call is None:
            for target, source, size in zip(
                targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True
            ):
                copy = self._driver.cuMemcpyAsync(target, source, size, stream)
                check(copy, f"copy of {size} bytes")
            return
        arrays = [np.ascontiguousarray(a, np.uint64) for a in (targets, sources, nbytes)]
        status = self._call(
            *(array.ctypes.data for array in arrays),
            count,
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._from_first),
            1,
            stream,
        )
        total = int(arrays[2].sum())
        check((self._driver.CUresult(status),), f"{count} copies, {total} bytes in all")
