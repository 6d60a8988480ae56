"""Run a compiled phase on torch's own OpenMP threads.

The kernel adds no thread pool: it borrows the team that torch's operators run on. So it uses the
cores that the serving engine bound those threads to (also when the main thread is bound to one
core), never competes with torch for them, and may be called from anywhere torch may.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from pagedweight.errors import UserError


@lru_cache(maxsize=1)
def _parallel() -> Any:
    """`GOMP_parallel` of the OpenMP runtime that torch resolved, preloaded ones included.

    libgomp has it, and so have libomp and libiomp5 on Linux. Raises UserError where none does.
    """
    try:
        function = ctypes.CDLL(None).GOMP_parallel
    except AttributeError as missing:
        raise UserError(
            "the CPU kernel runs on torch's OpenMP threads, and this process has no OpenMP runtime "
            "with GOMP_parallel (libgomp, or libomp or libiomp5 on Linux); use a torch build with "
            "OpenMP on Linux"
        ) from missing
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


def team_size() -> int:
    """Threads in torch's team: `torch.get_num_threads()`."""
    return torch.get_num_threads()


def run_team(phase: int, call: int, threads: int) -> None:
    """Run the function at address `phase` with the argument `call` on each of `threads` threads.

    Returns when all are done. The runtime may give fewer threads, so a phase takes its tasks from
    a counter and does not ask which thread it is.
    """
    _parallel()(phase, call, threads, 0)
