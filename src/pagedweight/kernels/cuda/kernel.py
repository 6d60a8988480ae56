"""`MoEKernel` on CUDA: torch tensors to launches."""

from __future__ import annotations

from functools import lru_cache, partial

import torch

from pagedweight.core.geometry import TILE_COLS, LayerShape, round_up
from pagedweight.errors import UserError
from pagedweight.kernels.contract import Activation, BlockTable, LayerStats
from pagedweight.kernels.cuda.decode import launch_decode, load_decode, load_decode_groups
from pagedweight.kernels.cuda.driver import bindings, check_capability
from pagedweight.kernels.cuda.params import Params
from pagedweight.kernels.cuda.prefill import launch_prefill, load_prefill, most_tokens, plan_bytes
from pagedweight.kernels.cuda.shapes import (
    GROUP_WARPS,
    Device,
    has_prefill,
    is_prefill,
    most_pairs,
)
from pagedweight.kernels.cuda.workspace import Workspace

ACTIVATIONS: dict[str, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
COUNTERS = 16 + 4 * 65536
"""Bytes of `Counters` (csrc/plan.cuh), for more blocks of tokens than any launch has."""
COLUMNS = TILE_COLS
"""Activations are read in whole column tiles; other widths are copied and padded with zeros."""


@lru_cache
def describe(index: int) -> Device:
    """CUDA device `index`. Raises UserError where the kernels cannot run on it."""
    bindings()
    found = torch.cuda.get_device_properties(index)
    check_capability((found.major, found.minor), found.name)
    shared = found.shared_memory_per_block_optin
    return Device(index, (found.major, found.minor), found.multi_processor_count, shared)


class CudaKernel:
    """The kernel with its scratch memory, for calls on one stream at a time (or graph replays).

    Compiles at the first call with a shape class and types (seconds; cached on disk). The first
    call must not be inside a graph capture. Raises UserError for float32 activations and devices
    it cannot run on, ValueError for tensors that do not fit the contract.
    """

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, Workspace] = {}

    def prepare(
        self, device: torch.device, dtype: torch.dtype, table_dtype: torch.dtype, experts: int
    ) -> None:
        """Compile and load what calls with these types need, so that none has to wait for it.

        Raises what a call would for the device or the types.
        """
        check_types(dtype, table_dtype)
        types = (dtype == torch.bfloat16, table_dtype == torch.bfloat16)
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes the context
            found = describe(torch.cuda.current_device())
            load_decode(found, *types)
            for token_groups in range(1, len(GROUP_WARPS) + 1):
                load_decode_groups(found, *types, token_groups)
            if has_prefill(found):
                load_prefill(found, *types, experts)

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
        if x.shape[0] == 0:
            return
        device = describe(x.device.index)
        workspace = self._workspaces.setdefault(x.device, Workspace(x.device))
        with torch.cuda.device(x.device):
            params = Params(activation=ACTIVATIONS[activation])
            x = _point_input(params, x, shape)
            _point(params, topk_ids, table)
            _point_stats(params, stats, num_tokens)
            stream = torch.cuda.current_stream().cuda_stream
            types = (x.dtype == torch.bfloat16, table_dtype == torch.bfloat16)
            wide = is_prefill(shape, *topk_ids.shape, device)
            start = launch_prefill if wide else partial(launch_decode, beside=beside)
            for first, tokens in slices(shape, *topk_ids.shape, wide):
                params.first_token, params.tokens = first, tokens
                params.x, params.out = x[first].data_ptr(), out[first].data_ptr()
                params.ids = topk_ids[first].data_ptr()
                params.weights = topk_weights[first].data_ptr()
                _carve(params, workspace, shape, wide)
                start(device, shape, *types, params, stream)


def slices(shape: LayerShape, tokens: int, top_k: int, wide: bool) -> list[tuple[int, int]]:
    """(first token, tokens) of each launch: no more than one can plan or has memory for."""
    most = most_tokens(shape, top_k) if wide else max(1, most_pairs(shape.experts) // top_k)
    return [(first, min(most, tokens - first)) for first in range(0, tokens, most)]


def _point_input(params: Params, x: torch.Tensor, shape: LayerShape) -> torch.Tensor:
    """x and its sizes; a copy padded with zeros where its width or address is odd."""
    hidden = shape.hidden
    if hidden % COLUMNS or x.data_ptr() % 16:
        padded = x.new_zeros((x.shape[0], round_up(hidden, COLUMNS)))
        padded[:, :hidden] = x
        x = padded
    params.x_stride = x.shape[1]
    params.hidden, params.intermediate, params.experts = hidden, shape.intermediate, shape.experts
    return x


def _point(params: Params, topk_ids: torch.Tensor, table: BlockTable) -> None:
    params.top_k, params.ids_are_64 = topk_ids.shape[1], topk_ids.dtype == torch.int64
    params.bits, params.planes = table.bits.data_ptr(), table.planes.data_ptr()
    params.tables = table.tables.data_ptr()


def _point_stats(params: Params, stats: LayerStats | None, num_tokens: torch.Tensor | None) -> None:
    if stats is not None:
        params.mass, params.seen = stats.mass.data_ptr(), stats.tokens.data_ptr()
        params.features = stats.features.data_ptr()
    if num_tokens is not None:
        params.num_tokens = num_tokens.data_ptr()


def _carve(params: Params, workspace: Workspace, shape: LayerShape, wide: bool) -> None:
    pairs = params.tokens * params.top_k
    params.middle_stride = round_up(shape.intermediate, COLUMNS)
    params.counters = workspace.address("counters", COUNTERS, zeroed=True)
    params.middle = workspace.address("middle", pairs * params.middle_stride * 2)
    params.parts = workspace.address("parts", pairs * shape.hidden * 4)
    if wide:
        params.plan = workspace.address("plan", plan_bytes(pairs, shape.experts))


def check_types(dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    """Raise UserError for float32 activations, ValueError for types that no kernel has."""
    if dtype == torch.float32:
        raise UserError(
            "the CUDA kernels multiply on tensor cores in bfloat16 or float16; float32 activations "
            "are served on the CPU only: choose --dtype bfloat16 or float16"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x is {dtype}, not bfloat16 or float16")
    if table_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"table_dtype is {table_dtype}, not float16 or bfloat16")


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
    check_types(x.dtype, table_dtype)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
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
        if not tensor.is_contiguous() or tensor.device != x.device:
            raise ValueError(f"{name} is not a contiguous tensor on {x.device}")
