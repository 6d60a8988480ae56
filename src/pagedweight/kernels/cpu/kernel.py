"""`MoEKernel` on the CPU: planes and tables read through their addresses, compiled by numba.

Float32 products and sums in 16 lanes, the order fixed by the shapes alone: a token's output has the
same bits in any batch, on any number of threads and on any machine with fused multiply-add.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from pagedweight.core.geometry import KINDS, LayerShape
from pagedweight.kernels.contract import Activation, BlockTable, LayerStats
from pagedweight.kernels.cpu import params as p
from pagedweight.kernels.cpu.machine import LANES, PRODUCT_BYTES, check_machine
from pagedweight.kernels.cpu.team import run_team, team_size

_LINE = 64
"""Bytes of a cache line: no vector of the scratch memory straddles one."""


@dataclass(frozen=True)
class _Phases:
    """The compiled phases, by their addresses; `route` and `count` are called on this thread."""

    route: Callable[[int], int]
    widen: int
    gate_up: int
    down: int
    count: Callable[[int], int]


@lru_cache(maxsize=1)
def compiled() -> _Phases:
    """Compile the kernel, or read it from `machine.cache_directory()`: some 10 s, or 0.3 s.

    Raises UserError on a processor that the kernel cannot run on.
    """
    check_machine()
    from pagedweight.kernels.cpu import phases, route  # importing them is what compiles

    return _Phases(
        route.route.ctypes,
        phases.widen.address,
        phases.gate_up.address,
        phases.down.address,
        route.count.ctypes,
    )


class _Scratch:
    """Memory that grows to the largest call and is kept: parts of it by name."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def carve(self, sizes: dict[int, int]) -> dict[int, int]:
        """Addresses of parts of the given byte sizes, by the same keys; contents undefined."""
        rounded = {name: -(-size // _LINE) * _LINE for name, size in sizes.items()}
        total = sum(rounded.values()) + _LINE
        if self._bytes.size < total:
            self._bytes = np.empty(total, np.uint8)
        at = -(-self._bytes.ctypes.data // _LINE) * _LINE
        places = {}
        for name, size in rounded.items():
            places[name] = at
            at += size
        return places


class CpuKernel:
    """The kernel with its scratch memory: about 4 (H + k I) bytes a token; one call at a time.

    Making one compiles the kernel (see `compiled`), so no request waits for that. Other threads
    that call it wait. Raises ValueError for tensors that do not fit the contract, for an expert id
    that the layer does not have and for a table row that was never committed.
    """

    def __init__(self) -> None:
        self._phases = compiled()
        self._scratch = _Scratch()
        self._call = np.zeros(p.SIZE, np.int64)
        self._lock = threading.Lock()

    def __call__(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shape: LayerShape,
        table: BlockTable,
        table_dtype: torch.dtype,
        activation: Activation,
        out: torch.Tensor,
        stats: LayerStats | None = None,
        num_tokens: torch.Tensor | None = None,
        beside: bool = False,
    ) -> None:
        check_call(x, topk_weights, topk_ids, shape, table, table_dtype, activation, out, stats)
        tokens = x.shape[0]
        if tokens == 0:
            return
        with self._lock:
            call, threads = self._call, team_size()
            call[p.TOKENS], call[p.TOP_K] = topk_ids.shape
            call[p.EXPERTS], call[p.HIDDEN] = shape.experts, shape.hidden
            call[p.INTERMEDIATE] = shape.intermediate
            call[p.ACTIVATION], call[p.DTYPE] = p.ACTIVATIONS[activation], p.DTYPES[x.dtype]
            call[p.TABLE_IS_HALF] = table_dtype == torch.float16
            call[p.WIDE_IDS] = topk_ids.dtype == torch.int64
            call[p.REAL_TOKENS] = tokens if num_tokens is None else int(num_tokens)
            _point(call, x, topk_weights, topk_ids, table, out, stats)
            _carve(call, self._scratch, threads)
            _run(self._phases, call, threads)


def _point(
    call: np.ndarray,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    table: BlockTable,
    out: torch.Tensor,
    stats: LayerStats | None,
) -> None:
    """Addresses of the contract's tensors."""
    call[p.X], call[p.OUT] = x.data_ptr(), out.data_ptr()
    call[p.TOPK_WEIGHTS], call[p.TOPK_IDS] = topk_weights.data_ptr(), topk_ids.data_ptr()
    call[p.BITS], call[p.PLANES] = table.bits.data_ptr(), table.planes.data_ptr()
    call[p.TABLES] = table.tables.data_ptr()
    call[p.WITH_STATS] = stats is not None
    if stats is not None:
        call[p.MASS], call[p.TOKENS_SEEN] = stats.mass.data_ptr(), stats.tokens.data_ptr()
        call[p.FEATURES] = stats.features.data_ptr()


def _carve(call: np.ndarray, scratch: _Scratch, threads: int) -> None:
    """Scratch memory for this call."""
    tokens, pairs = int(call[p.TOKENS]), int(call[p.TOKENS] * call[p.TOP_K])
    width, inner = (-(-int(call[f]) // 64) * 64 for f in (p.HIDDEN, p.INTERMEDIATE))
    strip = LANES * 4 * max(2 * width, inner) + 2 * PRODUCT_BYTES
    strip, sums = -(-strip // _LINE) * _LINE, tokens * LANES * 4
    places = scratch.carve(
        {
            p.OFFSETS: 4 * (int(call[p.EXPERTS]) + 1),
            p.PAIRS: 4 * pairs,
            p.ROWS: 4 * width * tokens,
            p.HIDDEN_ROWS: 4 * inner * pairs,
            p.NORMS: 4 * (tokens + pairs),
            p.STRIP: strip * threads,
            p.SUMS: sums * threads,
        }
    )
    for field, address in places.items():
        call[field] = address
    call[p.STRIP_BYTES], call[p.SUMS_BYTES] = strip, sums


def _run(phases: _Phases, call: np.ndarray, threads: int) -> None:
    """All phases, one after another."""
    address = call.ctypes.data
    fault = phases.route(address)
    if fault:
        raise ValueError(_fault(fault, int(call[p.NEXT_TASK]), int(call[p.EXPERTS])))
    for phase in (phases.widen, phases.gate_up, phases.down):
        call[p.NEXT_TASK] = call[p.NEXT_SLOT] = 0
        run_team(phase, address, threads)
    if call[p.WITH_STATS]:
        phases.count(address)


def _fault(fault: int, offender: int, experts: int) -> str:
    """The sentence for what `route` found."""
    if fault == p.FAULT_EXPERT:
        return f"topk_ids holds expert {offender}, and this layer has experts 0..{experts - 1}"
    block = f"{KINDS[offender % 2]} of expert {offender // 2}"
    if fault == p.FAULT_BITS:
        return f"the table's bits of {block} are not in 2..8: the row was never committed"
    return f"the table of {block} holds a null address among what its bits need"


def check_call(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shape: LayerShape,
    table: BlockTable,
    table_dtype: torch.dtype,
    activation: str,
    out: torch.Tensor,
    stats: LayerStats | None,
) -> None:
    """Raise ValueError unless sizes, types and layouts are the contract's."""
    experts, pairs = shape.experts, tuple(topk_ids.shape)
    if x.dtype not in p.DTYPES:
        raise ValueError(f"x is {x.dtype}, not float32, bfloat16 or float16")
    if table_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"table_dtype is {table_dtype}, not float16 or bfloat16")
    if activation not in p.ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(p.ACTIVATIONS)}")
    if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.dim() != 2:
        raise ValueError(f"topk_ids is {topk_ids.dtype} {pairs}, not int32 or int64 [T, k]")
    size = (pairs[0], shape.hidden)
    expected = [
        ("x", x, size, x.dtype),
        ("out", out, size, x.dtype),
        ("topk_weights", topk_weights, pairs, torch.float32),
        ("topk_ids", topk_ids, pairs, topk_ids.dtype),
        ("table.bits", table.bits, (experts, 2), torch.int32),
        ("table.planes", table.planes, (experts, 2, 8), torch.int64),
        ("table.tables", table.tables, (experts, 2), torch.int64),
    ]
    if stats is not None:
        expected += [
            ("stats.mass", stats.mass, (experts,), torch.float32),
            ("stats.tokens", stats.tokens, (experts,), torch.float32),
            ("stats.features", stats.features, (experts, 2, 3), torch.float32),
        ]
    for name, tensor, want, dtype in expected:
        if tuple(tensor.shape) != want or tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {want}")
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"{name} is not a contiguous tensor in host memory")
