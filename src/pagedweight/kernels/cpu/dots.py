"""Decoded rows times tokens: the register block of the matrix product for many tokens.

Each (row, token) has its own 16 partial sums, filled along the columns and folded at the end just
as in `rows.py`. So a token's result has the same bits however many tokens are beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pagedweight.kernels.cpu.ir import VEC, counted_loop, fma, i64, lane_sum, load, store, switch
from pagedweight.kernels.cpu.machine import BLOCK_ROWS, BLOCK_TOKENS, LANES

_VEC_BYTES = 4 * LANES


def _block(b: ir.IRBuilder, tokens: int, args: Sequence[ir.Value]) -> None:
    """BLOCK_ROWS rows times `tokens` tokens."""
    rows, stride, col_tiles, out, *xs = args
    starts = [b.add(rows, b.mul(stride, i64(m))) for m in range(BLOCK_ROWS)]
    pairs = [(m, n) for m in range(BLOCK_ROWS) for n in range(tokens)]

    def tile(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        for group in range(4):
            column = b.add(b.mul(index, i64(4 * _VEC_BYTES)), i64(_VEC_BYTES * group))
            ws = [load(b, b.add(s, column), VEC, 4) for s in starts]
            vs = [load(b, b.add(x, column), VEC, 4) for x in xs[:tokens]]
            sums = [fma(b, ws[m], vs[n], s) for (m, n), s in zip(pairs, sums, strict=True)]
        return sums

    zero = ir.Constant(VEC, [0.0] * LANES)
    sums = counted_loop(b, col_tiles, [zero] * len(pairs), tile)
    for (m, n), total in zip(pairs, sums, strict=True):
        store(b, lane_sum(b, total), b.add(out, i64(n * _VEC_BYTES + 4 * m)), 4)


@intrinsic
def dot_block(  # type: ignore[no-untyped-def]
    typingctx, tokens, rows, stride, col_tiles, out, x0, x1, x2
):
    """BLOCK_ROWS float32 rows times 1 to 3 float32 tokens, 64 * col_tiles columns; all integers.

    rows: address of the first row; stride: bytes between rows. Row m times token n is written to
    out[16 n + m].
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        tokens, *inner = args

        def case(n: int) -> Callable[[], None]:
            return lambda: _block(builder, n, inner)

        switch(builder, tokens, {n: case(n) for n in range(1, BLOCK_TOKENS + 1)})
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), codegen
