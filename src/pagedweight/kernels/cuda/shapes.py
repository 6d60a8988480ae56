"""Which build of the decode kernel serves a call, and how its shared memory is laid out.

The choice depends on shapes alone, and so does the order of additions.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedweight.core.geometry import LayerShape
from pagedweight.errors import UserError

BLOCK_TOKENS = 8
"""Tokens of one expert that decode multiplies at a time."""
WIDE_BLOCK_TOKENS = 144
"""The same for prefill."""
WINDOW, TABLES_AT, TABLE, STREAM = 1024, 16384, 8192, 6144
"""Addresses and sizes of csrc/decode.cu: WINDOW (0 before Hopper), TABLES_AT, TABLE_BYTES,
STREAM_BYTES."""
WIDE_WARPS, WIDE_TABLE, WIDE_STREAM, WIDE_COLUMNS = 8, 16384, 4608, 3 * 144 * 128
"""Of csrc/prefill.cu: WARPS, TABLE_BYTES, STREAM_BYTES, SLOTS * TILE_BYTES."""
PLANNERS = 32
"""Warps that make prefill's plan."""
PLAN = TABLES_AT - 2 * STREAM - WINDOW
"""Bytes for decode's plan, with its head."""
PARTS_BYTES = 1 << 28
"""Most bytes of down's unweighted outputs that one prefill launch keeps."""


@dataclass(frozen=True)
class Device:
    """What a launch depends on: ordinal, compute capability, multiprocessors, and the bytes of
    shared memory that one thread block can have."""

    index: int
    capability: tuple[int, int]
    processors: int
    shared_limit: int


def window_of(device: Device) -> int:
    """Where a thread block's own shared memory starts."""
    return WINDOW if device.capability >= (9, 0) else 0


@dataclass(frozen=True)
class Build:
    """Compile-time shape of a thread block: its warps."""

    warps: int

    @property
    def threads(self) -> int:
        return self.warps * 32

    def shared_bytes(self, window: int) -> int:
        """Dynamic shared memory: tables and streams of every warp, and what lies before them."""
        return TABLES_AT - window + self.warps * TABLE + (self.warps - 2) * STREAM

    @property
    def head(self) -> int:
        """Bytes of `Head` (csrc/decode.cu)."""
        return 44 + 8 * self.warps

    def defines(self) -> dict[str, int]:
        return {"PW_WARPS": self.warps, "PW_TABLE_BYTES": TABLE}


def most_blocks(pairs: int, experts: int) -> int:
    """Blocks of 8 tokens of one expert that `pairs` routed pairs can make."""
    return min(pairs, experts) + pairs // BLOCK_TOKENS


def pairs_at(pairs: int, experts: int) -> int:
    """Bytes of decode's plan before its pairs: each block, and its place in two orders."""
    return most_blocks(pairs, experts) * 8


def plan_bytes(pairs: int, experts: int) -> int:
    """Bytes of decode's plan, without its head."""
    return pairs_at(pairs, experts) + pairs * 2


def most_pairs(experts: int) -> int:
    """Routed (token, choice) pairs of one launch: each thread block keeps their plan."""
    room = PLAN - Build(16).head
    return max(n for n in range(room // 2) if plan_bytes(n, experts) <= room)


def choose_build(device: Device) -> Build:
    """As many warps as shared memory holds."""
    limit, window = device.shared_limit, window_of(device)
    warps = next((w for w in (16, 8, 4) if Build(w).shared_bytes(window) <= limit), 0)
    if not warps:
        raise UserError(
            f"the CUDA kernels need {Build(4).shared_bytes(window)} bytes of shared memory in a "
            f"thread block; this GPU has {limit}"
        )
    return Build(warps)


def prefill_shared_bytes(device: Device) -> int:
    """Dynamic shared memory of a thread block of prefill."""
    tables = WIDE_WARPS * WIDE_TABLE
    return TABLES_AT - window_of(device) + tables + WIDE_COLUMNS + (WIDE_WARPS - 2) * WIDE_STREAM


def most_wide_blocks(pairs: int, experts: int) -> int:
    """Blocks of 144 tokens of one expert that `pairs` routed pairs can make."""
    return min(pairs, experts) + pairs // WIDE_BLOCK_TOKENS


def has_prefill(device: Device) -> bool:
    """Whether prefill's thread block fits."""
    return prefill_shared_bytes(device) <= device.shared_limit


def is_prefill(shape: LayerShape, tokens: int, top_k: int, device: Device) -> bool:
    """Whether a call is for prefill: where decode would read weights several times, because experts
    have many tokens or because it needs many launches. A GPU without room for prefill's thread
    block decodes whatever comes."""
    if not has_prefill(device):
        return False
    pairs = tokens * top_k
    return pairs > 2 * most_pairs(shape.experts) or pairs > BLOCK_TOKENS * CROSSOVER * shape.experts


CROSSOVER = 1.5
"""Tokens an expert, in blocks of 8, from which prefill is quicker (docs/kernels.md, measured)."""


def choose_groups(
    shape: LayerShape, tokens: int, top_k: int, build: Build, processors: int
) -> tuple[int, int]:
    """log2 of the warps that share a unit of gate_up and of down; thresholds measured on an H200.

    By the rounds that all warps would need for gate_up alone, one unit each: groups pay where warps
    would be idle, in part of a round or at the end of a second; else they only add overhead.
    Rows of 4096 columns and more are worth a group always.
    """
    pairs, experts = tokens * top_k, shape.experts
    hit = experts * (1 - (1 - min(1.0, top_k / experts)) ** tokens)
    units = max(hit, pairs / BLOCK_TOKENS) * shape.gate_up.row_tiles / 2
    rounds = units / (build.warps * processors)
    log = next(log for most, log in GROUP_LOGS if rounds < most)
    cols, down_cols = shape.gate_up.col_tiles, shape.down.col_tiles
    log += cols >= LONG_ROW
    longer = max(0, (down_cols // cols).bit_length() - 1)
    most = min(3, build.warps.bit_length() - 1)
    return min(log, most), min(log + longer, most)


GROUP_LOGS = ((0.2, 2), (0.5, 1), (0.8, 0), (1.7, 1), (float("inf"), 0))
"""(rounds below which, log2 of the group)."""
LONG_ROW = 64
"""Column tiles of a long row."""
