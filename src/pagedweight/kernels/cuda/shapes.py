"""Which kernel serves a call, and how its shared memory is laid out.

The choice depends on shapes alone; the order of additions on shapes, on how many blocks of tokens
there are, and on whether the experts that a call's tokens reach have mixed precisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from pagedweight.core.geometry import LayerShape
from pagedweight.errors import UserError

BLOCK_TOKENS = 8
"""Tokens of one group, the n of a tensor-core product: a block of csrc/decode.cu is one group, of
csrc/decode_groups.cu 1 to 4."""
WIDE_BLOCK_TOKENS = 144
"""Most tokens of a block of prefill."""
WINDOW, TABLES_AT, TABLE, STREAM = 1024, 16384, 8192, 6144
"""Addresses and sizes of csrc/decode.cu: WINDOW (0 before Hopper), TABLES_AT, TABLE_BYTES,
STREAM_BYTES."""
PLAN = TABLES_AT - 2 * STREAM - WINDOW
"""Bytes for its plan, with its head."""
GROUP_REGION, GROUP_PLAN = 13952, 8192
"""Bytes of csrc/decode_groups.cu: a warp's ring and tables, and the plan with its head."""
WIDE_WARPS, WIDE_REGION, WIDE_HEAD, WIDE_COLUMNS = 8, 4608 + 16384, 1024, 3 * 144 * 128
"""Of csrc/prefill.cu: WARPS, REGION, REGIONS_AT, SLOTS * TILE_BYTES."""
PLANNERS = 32
"""Warps that make prefill's plan."""
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
    """Compile-time shape of a thread block of csrc/decode.cu: its warps."""

    warps: int
    block_tokens = BLOCK_TOKENS

    @property
    def threads(self) -> int:
        return self.warps * 32

    def shared_bytes(self, window: int) -> int:
        """Dynamic shared memory: tables and streams of every warp, and what lies before them."""
        return TABLES_AT - window + self.warps * TABLE + (self.warps - 2) * STREAM

    @property
    def head(self) -> int:
        """Bytes of `Head`."""
        return 52 + 8 * self.warps

    def defines(self) -> dict[str, int]:
        return {"PW_WARPS": self.warps, "PW_TABLE_BYTES": TABLE}


@dataclass(frozen=True)
class GroupBuild:
    """The same for csrc/decode_groups.cu, and the groups of 8 tokens that a weight is multiplied
    with once it is decoded."""

    warps: int
    groups: int

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS * self.groups

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the plan, and each warp's ring and tables."""
        return GROUP_PLAN + self.warps * GROUP_REGION

    @property
    def head(self) -> int:
        """Bytes of `Head` (csrc/desk.cuh)."""
        return 52 + 44 * self.warps

    def defines(self) -> dict[str, int]:
        return {
            "PW_WARPS": self.warps,
            "PW_GROUPS": self.groups,
            "PW_REGION_BYTES": GROUP_REGION,
            "PW_PLAN_BYTES": GROUP_PLAN,
        }


GROUP_WARPS = (16, 16, 12, 12)
"""Warps of a thread block by groups of tokens: as many as leave each the registers it needs."""


def most_blocks(pairs: int, experts: int) -> int:
    """Blocks of 8 tokens of one expert that `pairs` routed pairs can make."""
    return min(pairs, experts) + pairs // BLOCK_TOKENS


def pairs_at(pairs: int, experts: int) -> int:
    """Bytes of decode's plan before its pairs: each block, and its place in two orders."""
    return most_blocks(pairs, experts) * 8


def plan_bytes(pairs: int, experts: int) -> int:
    """Bytes of decode's plan, without its head."""
    return pairs_at(pairs, experts) + pairs * 2


@lru_cache
def most_pairs(experts: int) -> int:
    """Routed (token, choice) pairs of one launch of decode: each thread block keeps their plan."""
    room = GROUP_PLAN - GroupBuild(GROUP_WARPS[0], 1).head
    return max(n for n in range(room // 2) if plan_bytes(n, experts) <= room)


def is_few(shape: LayerShape, tokens: int, top_k: int) -> bool:
    """Whether csrc/decode.cu serves a call of decode: one group of tokens an expert is enough, and
    the plan fits there."""
    fits = plan_bytes(tokens * top_k, shape.experts) <= PLAN - Build(16).head
    return fits and choose_token_groups(shape, tokens, top_k) == 1


def choose_build(device: Device) -> Build:
    """As many warps as shared memory holds."""
    limit, window = device.shared_limit, window_of(device)
    warps = next((w for w in (16, 8, 4) if Build(w).shared_bytes(window) <= limit), 0)
    if not warps:
        raise _too_little(Build(4).shared_bytes(window), limit)
    return Build(warps)


def _too_little(needed: int, limit: int) -> UserError:
    return UserError(
        f"the CUDA kernels need {needed} bytes of shared memory in a thread block; this GPU has "
        f"{limit}"
    )


def choose_group_build(device: Device, groups: int) -> GroupBuild:
    """As many warps as registers and shared memory hold."""
    for warps in (16, 12, 8, 4):
        build = GroupBuild(warps, groups)
        if warps <= GROUP_WARPS[groups - 1] and build.shared_bytes <= device.shared_limit:
            return build
    raise _too_little(GroupBuild(4, groups).shared_bytes, device.shared_limit)


def choose_token_groups(shape: LayerShape, tokens: int, top_k: int) -> int:
    """Groups of 8 tokens in a block of decode: room for most experts' tokens, so that few weights
    are read and decoded twice."""
    mean = tokens * top_k / shape.experts
    usual = mean + 1.5 * mean**0.5
    return min(len(GROUP_WARPS), max(1, -int(-usual // BLOCK_TOKENS)))


def prefill_shared_bytes() -> int:
    """Dynamic shared memory of a thread block of prefill."""
    return WIDE_HEAD + WIDE_WARPS * WIDE_REGION + WIDE_COLUMNS


def most_wide_blocks(pairs: int, experts: int) -> int:
    """Blocks of 144 tokens of one expert that `pairs` routed pairs can make."""
    return min(pairs, experts) + pairs // WIDE_BLOCK_TOKENS


def has_prefill(device: Device) -> bool:
    """Whether prefill's thread block fits."""
    return prefill_shared_bytes() <= device.shared_limit


def is_prefill(shape: LayerShape, tokens: int, top_k: int, device: Device) -> bool:
    """Whether a call is for prefill: where decode would read weights several times, because experts
    have many tokens or because it needs many launches. A GPU without room for prefill's thread
    block decodes whatever comes."""
    if not has_prefill(device):
        return False
    pairs = tokens * top_k
    launches, each = pairs / most_pairs(shape.experts), pairs / shape.experts
    return launches > 2 or each > (CROSSOVER if launches <= 1 else CROSSOVER_SLICED)


CROSSOVER, CROSSOVER_SLICED = 32, 12
"""Tokens an expert from which prefill is quicker than one launch of decode (docs/kernels.md,
measured), and than two."""


@lru_cache
def group_table(
    shape: LayerShape, build: Build | GroupBuild, processors: int, mixed: bool
) -> tuple[tuple[int, tuple[int, int]], ...]:
    """(blocks of tokens below which, log2 of the warps that share a unit of gate_up and of down).

    By the rounds that all warps would need for gate_up alone, one unit each: groups pay where warps
    would be idle, in part of a round or at the end of a second; else they only add overhead. Where
    precisions are mixed, warps end at different times and run different code, so that shorter units
    pay sooner. Rows of 4096 columns and more are worth a group always, whatever the precisions.

    A launch carries the tables of both kinds of plan; on the device, which knows how many blocks
    its tokens make, each phase takes one by the precisions of the experts that they reach
    (csrc/plan.cuh, `order_blocks`, `phase_of`).

    The tables below are fitted to every pair's time on three shapes on an H200
    (benchmarks/results/kernel_groups.json, which tests hold them against).
    """
    cols, down_cols = shape.gate_up.col_tiles, shape.down.col_tiles
    if cols >= LONG_ROW:
        table = LONG_GROUPS
    elif 2 * down_cols <= cols:
        table = SHORT_DOWN_MIXED if mixed else SHORT_DOWN_ALIKE
    elif mixed and build.block_tokens > BLOCK_TOKENS:
        table = WIDE_MIXED
    else:
        table = GROUPS_MIXED if mixed else GROUPS_ALIKE
    round_blocks = build.warps * processors * 2 / shape.gate_up.row_tiles
    longer = max(0, (down_cols // cols).bit_length() - 1)
    most = max(log for log in range(4) if build.warps % (1 << log) == 0)
    return tuple(
        (
            MANY if rounds == REST else ceil(rounds * round_blocks),
            (min(gate, most), min(down + longer, most)),
        )
        for rounds, (gate, down) in table
    )


MANY = 1 << 30
"""Blocks of tokens that no launch has."""


def spared_processors(device: Device, tokens: int) -> int:
    """Multiprocessors that decode leaves to what runs on a second stream meanwhile.

    Without them a shared expert's products wait for decode's thread blocks, or they for it, which
    have their first units by number: measured on an H200 (benchmarks/results/shared_expert.json).
    """
    return device.processors // 32 if tokens <= SPARING_TOKENS else 0


SPARING_TOKENS = 64
"""Most tokens with which that has been measured to pay."""
LONG_ROW = 64
"""Column tiles of a long row."""
REST = float("inf")
LONG_GROUPS = ((2.7, (2, 2)), (REST, (1, 1)))
"""(rounds below which, log2 of the group of gate_up and of down) where gate_up's rows are long;
twice the group, and more, where down's are longer still."""
GROUPS_ALIKE = ((0.25, (2, 2)), (0.45, (1, 1)), (0.95, (0, 0)), (2.0, (1, 1)), (REST, (0, 0)))
GROUPS_MIXED = ((0.25, (2, 2)), (0.45, (1, 1)), (1.15, (2, 2)), (1.4, (1, 2)), (REST, (1, 1)))
"""The same for other rows, where a call's precisions are alike and where they are mixed."""
WIDE_MIXED = (*GROUPS_MIXED[:-1], (REST, (0, 1)))
"""Where they are mixed and a block has more than 8 tokens: measured on Qwen1.5-MoE alone."""
SHORT_DOWN_ALIKE = ((0.25, (2, 1)), (0.55, (1, 0)), (0.95, (2, 1)), (1.5, (1, 0)), (REST, (0, 0)))
SHORT_DOWN_MIXED = ((0.25, (2, 1)), (0.7, (2, 2)), (1.45, (2, 1)), (REST, (1, 0)))
"""The same where down's rows are at most half as long as gate_up's: a group has too little of
them."""
