"""Launching csrc/clusters.cu: raw addresses in, one kernel queued. No torch here."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from pagedweight.kernels.cuda.compiler import machine_code
from pagedweight.kernels.cuda.driver import Function, Module, check_capability

WARPS = 4


class Clusters(ctypes.Structure):
    """`Clusters` of csrc/clusters.cu, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ("s0", "s1", "m", "before", "after", "cuts", "bounds")
        ),
        *((name, ctypes.c_int) for name in ("rows", "width")),
    )


@lru_cache
def _load(capability: tuple[int, int], seed_bits: int, top_bits: int) -> Function:
    defines = {"PW_SEED_BITS": seed_bits, "PW_TOP_BITS": top_bits, "PW_WARPS": WARPS}
    return Module(machine_code("clusters.cu", defines, capability)).function("clusters", 0)


def launch_clusters(
    capability: tuple[int, int],
    name: str,
    seed_bits: int,
    top_bits: int,
    call: Clusters,
    stream: int,
) -> None:
    """Queue `call` on `stream`, in the device's context. UserError for a GPU that is too old
    (`name` says which) or without cuda.bindings."""
    check_capability(capability, name)
    function = _load(capability, seed_bits, top_bits)
    addresses = (ctypes.c_void_p * 1)(ctypes.addressof(call))
    function.launch(call.rows, 32 * WARPS, stream, ctypes.addressof(addresses))
