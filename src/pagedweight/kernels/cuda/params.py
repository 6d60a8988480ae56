"""The arguments of a launch, as csrc/plan.cuh has them. No torch here."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

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
)
CHOICES = 5
"""Of csrc/plan.cuh: groups of warps that a launch carries for each kind of plan."""


class Params(ctypes.Structure):
    """`Params` of csrc/plan.cuh, field by field."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _NUMBERS),
        ("group_below", ctypes.c_int * (2 * CHOICES)),
        ("group_logs", ctypes.c_int * (2 * CHOICES)),
    )

    def set_groups(self, mixed: bool, table: Sequence[tuple[int, tuple[int, int]]]) -> None:
        """`shapes.group_table` of one kind of plan; the last entry is repeated to the end."""
        for i in range(CHOICES):
            below, (gate_up, down) = table[min(i, len(table) - 1)]
            self.group_below[CHOICES * mixed + i] = below
            self.group_logs[CHOICES * mixed + i] = gate_up | down << 8


def launch(function: Function, blocks: int, threads: int, stream: int, params: Params) -> None:
    """Queue a kernel that takes `Params` and, opaque to the compiler, 65536."""
    two_to_16 = ctypes.c_uint32(1 << 16)
    addresses = (ctypes.c_void_p * 2)(ctypes.addressof(params), ctypes.addressof(two_to_16))
    function.launch(blocks, threads, stream, ctypes.addressof(addresses))
