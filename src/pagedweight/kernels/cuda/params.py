"""The arguments of a launch, as csrc/plan.cuh has them. No torch here."""

from __future__ import annotations

import ctypes

from pagedweight.kernels.cuda.driver import Function

_POINTERS = (
    "x",
    "weights",
    "ids",
    "bits",
    "planes",
    "tables",
    "out",
    "mass",
    "seen",
    "features",
    "num_tokens",
    "counters",
    "middle",
    "parts",
    "plan",
)
_NUMBERS = (
    "first_token",
    "tokens",
    "top_k",
    "experts",
    "hidden",
    "intermediate",
    "x_stride",
    "middle_stride",
    "activation",
    "ids_are_64",
    "pairs_at",
    "log_group_gate_up",
    "log_group_down",
    "log_group_gate_up_mixed",
    "log_group_down_mixed",
)


class Params(ctypes.Structure):
    """`Params` of csrc/plan.cuh, field by field."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _NUMBERS),
    )


def launch(function: Function, blocks: int, threads: int, stream: int, params: Params) -> None:
    """Queue a kernel that takes `Params` and, opaque to the compiler, 65536."""
    two_to_16 = ctypes.c_uint32(1 << 16)
    addresses = (ctypes.c_void_p * 2)(ctypes.addressof(params), ctypes.addressof(two_to_16))
    function.launch(blocks, threads, stream, ctypes.addressof(addresses))
