"""The phases that all threads of a team run: see `kernel.CpuKernel` for the whole.

    widen     tokens to float32, in the planes' order                tasks: tokens
    gate_up   act(gate) * up for every pair                          tasks: row tiles of gate
    down      weighted sum over experts, rounded to x's type         tasks: row tiles of down

A task handles its row tile for all experts, so threads share a hot expert's work. An expert's tile
is decoded while it is multiplied when it has up to 3 tokens, else once for all of them; both give
the same bits. Down adds a token's experts in ascending order, whatever else is in the batch.
Importing this module compiles it.
"""

from __future__ import annotations

import numpy as np
from numba import cfunc, njit, types

from pagedweight.core.geometry import MAX_BITS, TILE_COLS
from pagedweight.kernels.cpu import params as p
from pagedweight.kernels.cpu.activations import gate_sixteen
from pagedweight.kernels.cpu.columns import narrow, norm, widen_row
from pagedweight.kernels.cpu.dots import dot_block
from pagedweight.kernels.cpu.machine import (
    BLOCK_ROWS,
    BLOCK_TOKENS,
    LANES,
    PRODUCT_BYTES,
    cached_here,
)
from pagedweight.kernels.cpu.memory import fetch_add, floats_at, ints_at, longs_at
from pagedweight.kernels.cpu.rows import TILE_BYTES, row_pass

NORM_TASK = 32
"""Hidden rows whose norms are one task."""

with cached_here():

    @njit(cache=True, inline="always")
    def _tiles(width):
        """Column tiles of 64 that hold `width` columns."""
        return (width + TILE_COLS - 1) // TILE_COLS

    @njit(cache=True)
    def _decode(call, block, tile, col_tiles, tokens, out, x0, x1, x2):
        """Rows of a tile of block 2 e + kind: `row_pass` for each, at the committed bits."""
        bits = np.int64(ints_at(call[p.BITS], block + 1)[block])
        planes = call[p.PLANES] + 8 * MAX_BITS * block
        table = longs_at(call[p.TABLES], block + 1)[block] + tile * LANES * (2 << bits)
        step = 4 if tokens else 4 * TILE_COLS * col_tiles
        for row in range(LANES):
            offset = tile * col_tiles * TILE_BYTES + 16 * (row & 7) + 2 * (row >> 3)
            at = table + row * (2 << bits)
            half = call[p.TABLE_IS_HALF]
            row_pass(
                bits, tokens, planes, offset, at, half, col_tiles, out + row * step, x0, x1, x2
            )

    @njit(cache=True)
    def _multiply(strip, col_tiles, tokens, out, x0, x1, x2):
        """A decoded tile times up to 3 tokens."""
        stride = 4 * TILE_COLS * col_tiles
        for row in range(0, LANES, BLOCK_ROWS):
            at = strip + row * stride
            dot_block(tokens, at, stride, col_tiles, out + 4 * row, x0, x1, x2)

    @njit(cache=True)
    def _token_rows(call, kind, first, count):
        """Addresses of the input rows of `count` pairs from place `first`; the last repeats."""
        last = first + count - 1
        second, third = min(first + 1, last), min(first + 2, last)
        if kind:
            stride = 4 * TILE_COLS * _tiles(call[p.INTERMEDIATE])
            base = call[p.HIDDEN_ROWS]
            return base + stride * first, base + stride * second, base + stride * third
        stride = 4 * TILE_COLS * _tiles(call[p.HIDDEN])
        base, top_k = call[p.ROWS], call[p.TOP_K]
        order = ints_at(call[p.PAIRS], last + 1)
        return (
            base + stride * (order[first] // top_k),
            base + stride * (order[second] // top_k),
            base + stride * (order[third] // top_k),
        )

    @njit(cache=True)
    def _products(call, block, tile, strip, decoded, first, count, out):
        """Products of one tile with `count` pairs from place `first`."""
        kind = block & 1
        col_tiles = _tiles(call[p.INTERMEDIATE] if kind else call[p.HIDDEN])
        x0, x1, x2 = _token_rows(call, kind, first, count)
        if decoded:
            _multiply(strip, col_tiles, count, out, x0, x1, x2)
        else:
            _decode(call, block, tile, col_tiles, count, out, x0, x1, x2)

    @njit(cache=True)
    def _gate_up_expert(call, expert, tile, strip):
        """One expert's pairs through one row tile of gate and the same of up."""
        offsets = ints_at(call[p.OFFSETS], expert + 2)
        begin, end = offsets[expert], offsets[expert + 1]
        many, block = end - begin > BLOCK_TOKENS, 2 * expert
        col_tiles = _tiles(call[p.HIDDEN])
        other = (call[p.INTERMEDIATE] + LANES - 1) // LANES + tile
        half = LANES * 4 * TILE_COLS * col_tiles
        out = strip + call[p.STRIP_BYTES] - 2 * PRODUCT_BYTES
        if many:
            _decode(call, block, tile, col_tiles, 0, strip, 0, 0, 0)
            _decode(call, block, other, col_tiles, 0, strip + half, 0, 0, 0)
        gates = floats_at(out, LANES * BLOCK_TOKENS)
        ups = floats_at(out + PRODUCT_BYTES, LANES * BLOCK_TOKENS)
        rows = min(call[p.INTERMEDIATE] - tile * LANES, LANES)
        width = TILE_COLS * _tiles(call[p.INTERMEDIATE])
        for first in range(begin, end, BLOCK_TOKENS):
            count = min(end - first, BLOCK_TOKENS)
            _products(call, block, tile, strip, many, first, count, out)
            _products(call, block, other, strip + half, many, first, count, out + PRODUCT_BYTES)
            for n in range(count):
                at = call[p.HIDDEN_ROWS] + 4 * (width * (first + n) + tile * LANES)
                hidden = floats_at(at, LANES)
                act, dtype = call[p.ACTIVATION], call[p.DTYPE]
                gate_sixteen(gates, ups, LANES * n, rows, act, dtype, hidden)

    @njit(cache=True)
    def _down_expert(call, expert, tile, strip, sums):
        """One expert's pairs through one row tile of down, weighted, into sums [T, 16]."""
        offsets = ints_at(call[p.OFFSETS], expert + 2)
        begin, end = offsets[expert], offsets[expert + 1]
        many, block, top_k = end - begin > BLOCK_TOKENS, 2 * expert + 1, call[p.TOP_K]
        if many:
            col_tiles = _tiles(call[p.INTERMEDIATE])
            _decode(call, block, tile, col_tiles, 0, strip, 0, 0, 0)
        order = ints_at(call[p.PAIRS], end)
        weights = floats_at(call[p.TOPK_WEIGHTS], call[p.TOKENS] * top_k)
        out = strip + call[p.STRIP_BYTES] - PRODUCT_BYTES
        products = floats_at(out, LANES * BLOCK_TOKENS)
        for first in range(begin, end, BLOCK_TOKENS):
            count = min(end - first, BLOCK_TOKENS)
            _products(call, block, tile, strip, many, first, count, out)
            for n in range(count):
                pair = order[first + n]
                weight, token = weights[pair], pair // top_k
                for row in range(LANES):
                    sums[token * LANES + row] += weight * products[LANES * n + row]

    @njit(cache=True)
    def _zero_tile(call, tile):
        """Columns of the hidden rows that only pad them to whole tiles."""
        width = TILE_COLS * _tiles(call[p.INTERMEDIATE])
        places = ints_at(call[p.OFFSETS], call[p.EXPERTS] + 1)[call[p.EXPERTS]]
        for at in range(places):
            hidden = floats_at(call[p.HIDDEN_ROWS] + 4 * (width * at + tile * LANES), LANES)
            for column in range(LANES):
                hidden[column] = np.float32(0)

    @njit(cache=True)
    def _hidden_norms(call, first):
        """Norms of NORM_TASK hidden rows from place `first`."""
        width = TILE_COLS * _tiles(call[p.INTERMEDIATE])
        places = ints_at(call[p.OFFSETS], call[p.EXPERTS] + 1)[call[p.EXPERTS]]
        norms = floats_at(call[p.NORMS] + 4 * call[p.TOKENS], places)
        for at in range(first, min(first + NORM_TASK, places)):
            norms[at] = norm(floats_at(call[p.HIDDEN_ROWS] + 4 * width * at, width))

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def widen(address):
        """ROWS from X, and their norms when there are statistics."""
        call = longs_at(address, p.SIZE)
        hidden, dtype = call[p.HIDDEN], call[p.DTYPE]
        width = TILE_COLS * _tiles(hidden)
        norms = floats_at(call[p.NORMS], call[p.TOKENS])
        token = fetch_add(address + 8 * p.NEXT_TASK, 1)
        while token < call[p.TOKENS]:
            source = call[p.X] + token * hidden * (2 if dtype else 4)
            row = floats_at(call[p.ROWS] + 4 * width * token, width)
            widen_row(source, dtype, hidden, row)
            if call[p.WITH_STATS]:
                norms[token] = norm(row)
            token = fetch_add(address + 8 * p.NEXT_TASK, 1)

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def gate_up(address):
        """HIDDEN_ROWS of every pair."""
        call = longs_at(address, p.SIZE)
        strip = call[p.STRIP] + call[p.STRIP_BYTES] * fetch_add(address + 8 * p.NEXT_SLOT, 1)
        offsets = ints_at(call[p.OFFSETS], call[p.EXPERTS] + 1)
        tiles = 4 * _tiles(call[p.INTERMEDIATE])
        tile = fetch_add(address + 8 * p.NEXT_TASK, 1)
        while tile < tiles:
            if tile * LANES >= call[p.INTERMEDIATE]:
                _zero_tile(call, tile)
            else:
                for expert in range(call[p.EXPERTS]):
                    if offsets[expert + 1] > offsets[expert]:
                        _gate_up_expert(call, expert, tile, strip)
            tile = fetch_add(address + 8 * p.NEXT_TASK, 1)

    @njit(cache=True)
    def _down_tile(call, tile, strip, sums):
        """16 columns of OUT for all tokens."""
        tokens, hidden, dtype = call[p.TOKENS], call[p.HIDDEN], call[p.DTYPE]
        offsets = ints_at(call[p.OFFSETS], call[p.EXPERTS] + 1)
        for index in range(tokens * LANES):
            sums[index] = np.float32(0)
        for expert in range(call[p.EXPERTS]):
            if offsets[expert + 1] > offsets[expert]:
                _down_expert(call, expert, tile, strip, sums)
        rows = min(hidden - tile * LANES, LANES)
        for token in range(tokens):
            at = call[p.OUT] + (token * hidden + tile * LANES) * (2 if dtype else 4)
            narrow(sums[token * LANES : (token + 1) * LANES], rows, dtype, at)

    @cfunc(types.void(types.int64), cache=True, error_model="numpy")
    def down(address):
        """OUT, and the norms of the hidden rows when there are statistics."""
        call = longs_at(address, p.SIZE)
        slot = fetch_add(address + 8 * p.NEXT_SLOT, 1)
        strip = call[p.STRIP] + call[p.STRIP_BYTES] * slot
        sums = floats_at(call[p.SUMS] + call[p.SUMS_BYTES] * slot, call[p.TOKENS] * LANES)
        tiles = (call[p.HIDDEN] + LANES - 1) // LANES
        places = call[p.TOKENS] * call[p.TOP_K] if call[p.WITH_STATS] else 0
        tasks = tiles + (places + NORM_TASK - 1) // NORM_TASK
        task = fetch_add(address + 8 * p.NEXT_TASK, 1)
        while task < tasks:
            if task < tiles:
                _down_tile(call, task, strip, sums)
            else:
                _hidden_norms(call, (task - tiles) * NORM_TASK)
            task = fetch_add(address + 8 * p.NEXT_TASK, 1)
