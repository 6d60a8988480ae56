"""Launching csrc/descend.cu: raw addresses in, one kernel queued. No torch here."""

from __future__ import annotations

import ctypes
from functools import lru_cache

from pagedweight.kernels.cuda.compiler import machine_code
from pagedweight.kernels.cuda.driver import Function, Module, check_capability

WARPS = 4
COLUMNS = 128
"""Most columns of a block."""


class Descent(ctypes.Structure):
    """`Descent` of csrc/descend.cu, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in (
                "codes",
                "apart",
                "pulled",
                "product",
                "weights",
                "tables",
                "pull",
                "trust",
            )
        ),
        *((name, ctypes.c_int) for name in ("rows", "rows_of_expert", "cols", "start", "width")),
    )


@lru_cache
def _load(capability: tuple[int, int], seed_bits: int, levels: int) -> Function:
    defines = {
        "PW_SEED_BITS": seed_bits,
        "PW_LEVELS": levels,
        "PW_COLUMNS": COLUMNS,
        "PW_WARPS": WARPS,
    }
    return Module(machine_code("descend.cu", defines, capability)).function("descend", 0)


def launch_descend(
    capability: tuple[int, int], name: str, seed_bits: int, levels: int, call: Descent, stream: int
) -> None:
    """Queue the block `call` on `stream`, in the device's context. UserError for a GPU that is too
    old (`name` says which) or without cuda.bindings."""
    check_capability(capability, name)
    function = _load(capability, seed_bits, levels)
    addresses = (ctypes.c_void_p * 1)(ctypes.addressof(call))
    blocks = -(-call.rows // WARPS)
    function.launch(blocks, 32 * WARPS, stream, ctypes.addressof(addresses))
