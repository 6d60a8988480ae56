"""Codes to bit-planes and back: the bit order of `docs/format.md`, in numpy.

Inside a tile, word `4 * g + t` (g in 0..7, t in 0..3) belongs to lane 4g + t of a warp. Its bit
`16 h + 8 n + 4 c + s` (h, n, c in 0..1, s in 0..3) is row `g + 8 h`, column `16 t + 8 n + 2 s + c`:
the lane's two rows of an m16n8k16 fragment and sixteen neighbouring columns, ordered so that
nibble transposition yields the fragment's register pairs in order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagedweight.core.geometry import TILE_COLS, TILE_ROWS, BlockGeometry


def _tile_bit_order() -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """(rows, cols), each [32 words, 32 bits]: the place in a tile of each bit of each word."""
    word = np.arange(32)[:, None]
    bit = np.arange(32)[None, :]
    g, t = word // 4, word % 4
    h, n, c, s = bit >> 4, (bit >> 3) & 1, (bit >> 2) & 1, bit & 3
    return g + 8 * h, 16 * t + 8 * n + 2 * s + c


TILE_BIT_ROW, TILE_BIT_COL = _tile_bit_order()


def pad_codes(codes: npt.NDArray[np.uint8], block: BlockGeometry) -> npt.NDArray[np.uint8]:
    """Logical codes [..., N, K] to padded [..., padded N, padded K]; padding is code 0."""
    lead = codes.shape[:-2]
    if codes.shape[-2:] != (block.rows, block.cols):
        raise ValueError(f"codes of shape {codes.shape} do not fit {block}")
    out = np.zeros((*lead, block.segments, block.padded_segment_rows, block.padded_cols), np.uint8)
    parts = codes.reshape(*lead, block.segments, block.segment_rows, block.cols)
    out[..., : block.segment_rows, : block.cols] = parts
    return out.reshape(*lead, block.padded_rows, block.padded_cols)


def pack(codes: npt.NDArray[np.uint8], block: BlockGeometry, planes: int) -> npt.NDArray[np.uint32]:
    """Codes [..., N, K] of `planes` bits to words [planes, ..., row tiles, col tiles, 32].

    Plane 0 holds the most significant bit, so the first b planes are the b-bit code.
    Raises ValueError when a code does not fit in `planes` bits.
    """
    if codes.size and int(codes.max()) >> planes:
        raise ValueError(f"code {int(codes.max())} does not fit in {planes} bits")
    padded = pad_codes(codes, block)
    lead = padded.shape[:-2]
    tiles = padded.reshape(*lead, block.row_tiles, TILE_ROWS, block.col_tiles, TILE_COLS)
    tiles = np.moveaxis(tiles, -3, -2)  # [..., row tiles, col tiles, 16, 64]
    by_word = tiles[..., TILE_BIT_ROW, TILE_BIT_COL]  # [..., 32 words, 32 bits]
    shape = (planes, *by_word.shape[:-1])
    out = np.empty(shape, np.uint32)
    for plane in range(planes):
        bits = (by_word >> (planes - 1 - plane)) & 1
        packed = np.packbits(bits, axis=-1, bitorder="little")
        out[plane] = packed.view("<u4")[..., 0]
    return out


def unpack(words: npt.NDArray[np.uint32], block: BlockGeometry) -> npt.NDArray[np.uint8]:
    """Words [b planes, ..., row tiles, col tiles, 32] to b-bit codes [..., N, K], no padding."""
    lead = words.shape[1:-3]
    if words.shape[-3:] != (block.row_tiles, block.col_tiles, 32):
        raise ValueError(f"planes of shape {words.shape} do not fit {block}")
    by_word = np.zeros((*words.shape[1:], 32), np.uint8)
    for plane in words:
        octets = np.ascontiguousarray(plane, "<u4")[..., None].view(np.uint8)
        bits = np.unpackbits(octets, axis=-1, bitorder="little")
        by_word = (by_word << 1) | bits
    tiles = np.empty((*words.shape[1:-1], TILE_ROWS, TILE_COLS), np.uint8)
    tiles[..., TILE_BIT_ROW, TILE_BIT_COL] = by_word
    padded = np.moveaxis(tiles, -2, -3).reshape(
        *lead, block.segments, block.padded_segment_rows, block.padded_cols
    )
    logical = padded[..., : block.segment_rows, : block.cols]
    return np.ascontiguousarray(logical).reshape(*lead, block.rows, block.cols)


def pad_tables(tables: npt.NDArray[np.uint16], block: BlockGeometry) -> npt.NDArray[np.uint16]:
    """Tables [..., N, 2^b] of raw 16-bit centroids to [..., padded N, 2^b]; padding is zero."""
    lead, width = tables.shape[:-2], tables.shape[-1]
    out = np.zeros((*lead, block.segments, block.padded_segment_rows, width), tables.dtype)
    out[..., : block.segment_rows, :] = tables.reshape(
        *lead, block.segments, block.segment_rows, width
    )
    return out.reshape(*lead, block.padded_rows, width)


def unpad_tables(tables: npt.NDArray[np.uint16], block: BlockGeometry) -> npt.NDArray[np.uint16]:
    """Inverse of `pad_tables`: [..., padded N, 2^b] to [..., N, 2^b]."""
    lead, width = tables.shape[:-2], tables.shape[-1]
    parts = tables.reshape(*lead, block.segments, block.padded_segment_rows, width)
    return parts[..., : block.segment_rows, :].reshape(*lead, block.rows, width)
