"""Sizes of a linear block: tiles, planes, lookup tables and M_i^b (paper eq. 3).

A plane is a sequence of tiles of 16 output rows by 64 input columns, row tile by row tile, so one
tile of one plane is 32 words of 32 bits: one word for each lane of a warp, which holds what that
lane needs for a 16-row tensor-core fragment. `docs/format.md` has the bit order inside a word.
Rows are padded to 16 within each segment (gate_up has two: gate, then up), columns to 64.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 16
TILE_COLS = 64
TILE_WORDS = 32
"""32-bit words in one tile of one plane: TILE_ROWS * TILE_COLS / 32."""
WORD_BYTES = 4
CENTROID_BYTES = 2
"""A centroid is a float16 or a bfloat16."""
MIN_BITS = 2
MAX_BITS = 8

KINDS = ("gate_up", "down")
"""The linear blocks of an expert; a kind's index is its position here, everywhere."""
GATE_UP, DOWN = 0, 1


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """Shape of one linear block: `segments * segment_rows` output rows, `cols` input columns."""

    segments: int
    segment_rows: int
    cols: int

    def __post_init__(self) -> None:
        if min(self.segments, self.segment_rows, self.cols) < 1:
            raise ValueError(f"empty linear block: {self}")

    @property
    def rows(self) -> int:
        """Logical output rows N, without padding."""
        return self.segments * self.segment_rows

    @property
    def padded_segment_rows(self) -> int:
        return round_up(self.segment_rows, TILE_ROWS)

    @property
    def padded_rows(self) -> int:
        return self.segments * self.padded_segment_rows

    @property
    def padded_cols(self) -> int:
        return round_up(self.cols, TILE_COLS)

    @property
    def row_tiles(self) -> int:
        return self.padded_rows // TILE_ROWS

    @property
    def col_tiles(self) -> int:
        return self.padded_cols // TILE_COLS

    @property
    def plane_words(self) -> int:
        """32-bit words in one plane."""
        return self.row_tiles * self.col_tiles * TILE_WORDS

    @property
    def plane_bytes(self) -> int:
        """Bytes of one plane; a multiple of 128."""
        return self.plane_words * WORD_BYTES

    def table_bytes(self, bits: int) -> int:
        """Bytes of the lookup table of one level: 2^bits centroids for every padded row."""
        return self.padded_rows * (1 << bits) * CENTROID_BYTES

    def resident_bytes(self, bits: int) -> int:
        """M_i^b of eq. 3: bytes on the device at `bits`, planes and the one committed table."""
        return bits * self.plane_bytes + self.table_bytes(bits)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The routed experts of one MoE layer (or of one rank's part of it).

    `experts` E, `hidden` H, `intermediate` I: gate_up is [2I, H] (gate rows, then up rows) and
    down is [H, I], each applied as `x @ W.T`.
    """

    experts: int
    hidden: int
    intermediate: int

    @property
    def gate_up(self) -> BlockGeometry:
        return BlockGeometry(segments=2, segment_rows=self.intermediate, cols=self.hidden)

    @property
    def down(self) -> BlockGeometry:
        return BlockGeometry(segments=1, segment_rows=self.hidden, cols=self.intermediate)

    @property
    def blocks(self) -> tuple[BlockGeometry, BlockGeometry]:
        """Geometry by kind index: (gate_up, down)."""
        return (self.gate_up, self.down)

    def part(self, rank: int, ranks: int) -> LayerShape:
        """The tensor-parallel part of `rank`: its column tiles of down, so I is cut at 64.

        The cut may be uneven (704 columns on 2 ranks are 384 and 320). Raises ValueError when a
        rank would be left without a tile.
        """
        start, stop = part_columns(self.intermediate, rank, ranks)
        return LayerShape(self.experts, self.hidden, stop - start)


def part_columns(intermediate: int, rank: int, ranks: int) -> tuple[int, int]:
    """Half-open range of the intermediate dimension that tensor-parallel `rank` holds."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is not one of {ranks}")
    tiles = round_up(intermediate, TILE_COLS) // TILE_COLS
    if tiles < ranks:
        raise ValueError(
            f"an expert width of {intermediate} is {tiles} tiles of {TILE_COLS}: "
            f"it cannot be cut into {ranks} parts"
        )
    start, stop = tiles * rank // ranks, tiles * (rank + 1) // ranks
    return start * TILE_COLS, min(stop * TILE_COLS, intermediate)
