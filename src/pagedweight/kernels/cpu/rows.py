"""One weight row from bit-planes: decoded into memory, or multiplied with tokens as it is decoded.

Sixteen bits of a plane are sixteen neighbouring columns of one row (`docs/format.md`). They go into
a lane mask as they are, so a code costs one masked `or` a plane, and the centroids come out of
registers. Columns stay in the order of the bits: activations are laid out the same way once
(`columns.py`), which leaves nothing to permute here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagedweight.core.geometry import MAX_BITS, MIN_BITS
from pagedweight.kernels.cpu.ir import (
    F32,
    HALF,
    I1,
    I16,
    I32,
    I64,
    IVEC,
    VEC,
    call,
    counted_loop,
    fma,
    i64,
    lane_sum,
    load,
    splat,
    store,
    switch,
)
from pagedweight.kernels.cpu.machine import AVX2, BLOCK_TOKENS, LANES, WIDE

TILE_BYTES = 128
"""One tile of one plane."""
GROUP_BYTES = 4
"""From one group of 16 columns to the next inside a row of a tile: the next lane's word."""
_VEC_BYTES = 4 * LANES
_MASK = ir.VectorType(I1, LANES)
_Lookup = Callable[[Sequence[ir.Value]], ir.Value]


def _load_table(b: ir.IRBuilder, bits: int, table: ir.Value, half: ir.Value) -> list[ir.Value]:
    """The row's 2^bits 16-bit centroids as float32 vectors; fewer than 16 repeat."""
    width = min(1 << bits, LANES)
    vectors = []
    for start in range(0, 1 << bits, width):
        at = b.add(table, i64(2 * start))
        raw = load(b, at, ir.VectorType(I16, width), 2)
        order = ir.Constant(IVEC, [lane % width for lane in range(LANES)])
        raw = b.shuffle_vector(raw, raw, order)
        as_bf16 = b.bitcast(b.shl(b.zext(raw, IVEC), splat(16)), VEC)
        as_half = b.fpext(b.bitcast(raw, ir.VectorType(HALF, LANES)), VEC)
        vectors.append(b.select(half, as_half, as_bf16))
    return vectors


def _codes(b: ir.IRBuilder, masks: Sequence[ir.Value]) -> ir.Value:
    """Lane masks of the planes, most significant first, to integer codes."""
    code = splat(0)
    for place, mask in enumerate(reversed(masks)):
        code = b.or_(code, b.select(mask, splat(1 << place), splat(0)))
    return code


def _pick(
    b: ir.IRBuilder,
    leaves: Sequence[ir.Value],
    upper: Sequence[ir.Value],
    leaf: Callable[[ir.Value], ir.Value],
) -> ir.Value:
    """Look up in every leaf of a table and choose by the upper planes' masks, the first first."""
    if len(leaves) == 1:
        return leaf(leaves[0])
    middle = len(leaves) // 2
    low, high = (_pick(b, part, upper[1:], leaf) for part in (leaves[:middle], leaves[middle:]))
    return b.select(upper[0], high, low)


def _wide_lookup(b: ir.IRBuilder, vectors: Sequence[ir.Value]) -> _Lookup:
    """Table in 512-bit registers: 32 centroids a lookup, 16 when there are no more."""
    leaves = [vectors[first : first + 2] for first in range(0, len(vectors), 2)]

    def lookup(masks: Sequence[ir.Value]) -> ir.Value:
        code = _codes(b, masks[-min(len(masks), 5) :])

        def leaf(parts: Sequence[ir.Value]) -> ir.Value:
            if len(parts) == 1:
                return call(b, "llvm.x86.avx512.permvar.sf.512", VEC, (parts[0], code))
            args = (parts[0], code, parts[1])
            return call(b, "llvm.x86.avx512.vpermi2var.ps.512", VEC, args)

        return _pick(b, leaves, masks[:-5], leaf)

    return lookup


def _avx2_lookup(b: ir.IRBuilder, vectors: Sequence[ir.Value]) -> _Lookup:
    """Table in 256-bit registers: 8 centroids a lookup, for each half of the lanes."""

    def halves(vector: ir.Value) -> list[ir.Value]:
        index = ir.VectorType(I32, 8)
        order = [ir.Constant(index, list(range(first, first + 8))) for first in (0, 8)]
        return [b.shuffle_vector(vector, vector, o) for o in order]

    eighths = [half for vector in vectors for half in halves(vector)]

    def lookup(masks: Sequence[ir.Value]) -> ir.Value:
        codes = halves(_codes(b, masks[-min(len(masks), 3) :]))

        def leaf(eighth: ir.Value) -> ir.Value:
            low, high = (
                call(b, "llvm.x86.avx2.permps", ir.VectorType(F32, 8), (eighth, c)) for c in codes
            )
            both = ir.Constant(IVEC, list(range(LANES)))
            return b.shuffle_vector(low, high, both)

        leaves = eighths[: 1 << max(len(masks) - 3, 0)]
        return _pick(b, leaves, masks[:-3], leaf)

    return lookup


def _plain_lookup(b: ir.IRBuilder, vectors: Sequence[ir.Value]) -> _Lookup:
    """Table in stack memory, one load a lane: for machines without a lookup instruction."""
    table = cgutils.alloca_once(b, F32, size=ir.Constant(I32, LANES * len(vectors)))
    base = b.ptrtoint(table, I64)
    for number, vector in enumerate(vectors):
        store(b, vector, b.add(base, i64(_VEC_BYTES * number)), 4)

    def lookup(masks: Sequence[ir.Value]) -> ir.Value:
        code = _codes(b, masks)
        out: ir.Value = ir.Constant(VEC, ir.Undefined)
        for lane in range(LANES):
            where = ir.Constant(I32, lane)
            at = b.zext(b.extract_element(code, where), I64)
            value = load(b, b.add(base, b.shl(at, i64(2))), F32, 4)
            out = b.insert_element(out, value, where)
        return out

    return lookup


def _row(b: ir.IRBuilder, bits: int, tokens: int, args: Sequence[ir.Value]) -> None:
    """The code for one number of bits and of tokens; 0 tokens: the row is stored."""
    planes, offset, table, half, col_tiles, out, *xs = args
    starts = [b.add(load(b, b.add(planes, i64(8 * p)), I64, 8), offset) for p in range(bits)]
    vectors = _load_table(b, bits, table, half)
    lookup = (_wide_lookup if WIDE else _avx2_lookup if AVX2 else _plain_lookup)(b, vectors)

    def tile(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        in_plane = b.mul(index, i64(TILE_BYTES))
        for group in range(4):
            at = b.add(in_plane, i64(GROUP_BYTES * group))
            masks = [b.bitcast(load(b, b.add(s, at), I16, 2), _MASK) for s in starts]
            weights = lookup(masks)
            column = b.add(b.mul(index, i64(4 * _VEC_BYTES)), i64(_VEC_BYTES * group))
            if not tokens:
                store(b, weights, b.add(out, column), 4)
            for n in range(tokens):
                x = load(b, b.add(xs[n], column), VEC, 4)
                sums[n] = fma(b, weights, x, sums[n])
        return sums

    zero = ir.Constant(VEC, [0.0] * LANES)
    sums = counted_loop(b, col_tiles, [zero] * tokens, tile)
    for n, total in enumerate(sums):
        store(b, lane_sum(b, total), b.add(out, i64(n * _VEC_BYTES)), 4)


@intrinsic
def row_pass(  # type: ignore[no-untyped-def]
    typingctx, bits, tokens, planes, offset, table, half, col_tiles, out, x0, x1, x2
):
    """Decode one row of one block at `bits`; all arguments are integers, addresses in bytes.

    planes: address of the block's int64 [8] plane addresses. offset: bytes from a plane's start to
    the row's first 16 bits (`row_offset`). table: address of the row's centroids, float16 if `half`
    else bfloat16. tokens 0: float32 [64 * col_tiles] weights are written to `out`. tokens 1 to 3:
    the products with the float32 rows at x0, x1, x2 are written to out[0], out[16], out[32].
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        wide = [builder.zext(a, I64) if a.type == I1 else a for a in args]
        bits, tokens, planes, offset, table, half, *rest = wide
        is_half = builder.icmp_signed("!=", half, i64(0))
        inner = [planes, offset, table, is_half, *rest]

        def case(q: int, n: int) -> Callable[[], None]:
            return lambda: _row(builder, q, n, inner)

        key = builder.add(builder.mul(bits, i64(BLOCK_TOKENS + 1)), tokens)
        levels = range(MIN_BITS, MAX_BITS + 1)
        counts = range(BLOCK_TOKENS + 1)
        cases = {q * (BLOCK_TOKENS + 1) + n: case(q, n) for q in levels for n in counts}
        switch(builder, key, cases)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen
