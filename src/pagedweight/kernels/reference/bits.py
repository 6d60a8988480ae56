"""Bit-planes to codes and back in torch, on any device: the same order as `checkpoint.packing`."""

from __future__ import annotations

import torch

from pagedweight.checkpoint.packing import TILE_BIT_COL, TILE_BIT_ROW
from pagedweight.core.geometry import TILE_COLS, TILE_ROWS, TILE_WORDS, BlockGeometry

_PLACE = torch.from_numpy(TILE_BIT_ROW * TILE_COLS + TILE_BIT_COL).reshape(-1)
"""[32 words * 32 bits]: the place in a row-major tile of each bit of each word."""


def pack_padded(codes: torch.Tensor, block: BlockGeometry, planes: int) -> torch.Tensor:
    """uint8 codes [padded N, padded K] of `planes` bits to int32 words [planes, R, C, 32].

    Padding is packed as it stands, which is how a test puts garbage there.
    """
    device = codes.device
    tiles = codes.reshape(block.row_tiles, TILE_ROWS, block.col_tiles, TILE_COLS)
    tiles = tiles.permute(0, 2, 1, 3).reshape(block.row_tiles, block.col_tiles, -1)
    by_word = tiles[..., _PLACE.to(device)].unflatten(-1, (TILE_WORDS, 32))
    shift = torch.arange(32, dtype=torch.int32, device=device)
    out = torch.empty((planes, *by_word.shape[:-1]), dtype=torch.int32, device=device)
    for plane in range(planes):
        bits = ((by_word >> (planes - 1 - plane)) & 1).to(torch.int32)
        out[plane] = (bits << shift).sum(-1)  # each bit once: the sum is an or
    return out


def unpack_padded(words: torch.Tensor, block: BlockGeometry) -> torch.Tensor:
    """int32 words [b, R, C, 32] of the first b planes to uint8 b-bit codes [padded N, padded K]."""
    device = words.device
    shift = torch.arange(32, dtype=torch.int32, device=device)
    by_word = torch.zeros((*words.shape[1:], 32), dtype=torch.uint8, device=device)
    for plane in words:
        bits = (plane[..., None] >> shift) & 1
        by_word = (by_word << 1) | bits.to(torch.uint8)
    tiles = torch.empty((block.row_tiles, block.col_tiles, 1024), dtype=torch.uint8, device=device)
    tiles[..., _PLACE.to(device)] = by_word.flatten(-2)
    tiles = tiles.unflatten(-1, (TILE_ROWS, TILE_COLS)).permute(0, 2, 1, 3)
    return tiles.reshape(block.padded_rows, block.padded_cols)


def logical(padded: torch.Tensor, block: BlockGeometry) -> torch.Tensor:
    """[padded N, padded K] to [N, K]: the padding of each segment and of the columns cut off."""
    parts = padded.reshape(block.segments, block.padded_segment_rows, block.padded_cols)
    parts = parts[:, : block.segment_rows, : block.cols]
    return parts.reshape(block.rows, block.cols).contiguous()


def with_padding(codes: torch.Tensor, block: BlockGeometry) -> torch.Tensor:
    """Inverse of `logical`: [N, K] to [padded N, padded K]; padding is code 0."""
    size = (block.segments, block.padded_segment_rows, block.padded_cols)
    out = codes.new_zeros(size)
    out[:, : block.segment_rows, : block.cols] = codes.reshape(block.segments, -1, block.cols)
    return out.reshape(block.padded_rows, block.padded_cols)


def row_padding(block: BlockGeometry, device: torch.device | str = "cpu") -> torch.Tensor:
    """bool [padded N]: which rows are padding."""
    row = torch.arange(block.padded_rows, device=device)
    return row % block.padded_segment_rows >= block.segment_rows


def dequantize_block(
    words: torch.Tensor, table: torch.Tensor, block: BlockGeometry, dtype: torch.dtype
) -> torch.Tensor:
    """Planes [b, R, C, 32] and their table [padded N, 2^b] to weights [N, K] of `dtype`."""
    codes = unpack_padded(words, block).to(torch.int64)
    return logical(torch.gather(table.to(dtype), 1, codes), block)
