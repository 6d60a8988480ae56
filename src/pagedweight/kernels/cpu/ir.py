"""Pieces of LLVM that the kernel's two inner loops are written with.

Written in vectors of 16 floats on every machine; LLVM splits them where registers are narrower.
Nothing here may be reordered by the compiler: no fast-math flag is set, so a sum has one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import cgutils

from pagedweight.kernels.cpu.machine import LANES

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32, HALF = ir.FloatType(), ir.HalfType()
VEC = ir.VectorType(F32, LANES)
IVEC = ir.VectorType(I32, LANES)


def i64(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def splat(value: int) -> ir.Constant:
    """The integer in all lanes."""
    return ir.Constant(IVEC, [value] * LANES)


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    """Load a `kind` from an integer address."""
    pointer = builder.inttoptr(address, kind.as_pointer())
    return builder.load(pointer, align=align)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int) -> None:
    """Store at an integer address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
    """Call an LLVM intrinsic by its full name."""
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c with one rounding, lane by lane."""
    return call(builder, "llvm.fma.v16f32", VEC, (a, b, c))


def lane_sum(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    """The sum of the lanes, halves folded together: one order for every dot product."""
    width = LANES
    while width > 1:
        width //= 2
        mask = [ir.Constant(ir.VectorType(I32, width), list(r)) for r in _halves(width)]
        low, high = (builder.shuffle_vector(vector, vector, m) for m in mask)
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(I32, 0))


def _halves(width: int) -> tuple[range, range]:
    return range(width), range(width, 2 * width)


def counted_loop(
    builder: ir.IRBuilder,
    count: ir.Value,
    carried: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """`for i in range(count): carried = body(i, carried)`, count >= 1; returns the last carried."""
    before = builder.block
    loop = builder.append_basic_block("loop")
    after = builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(I64)
    index.add_incoming(i64(0), before)
    phis = []
    for value in carried:
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        phis.append(phi)
    results = body(index, list(phis))
    following = builder.add(index, i64(1))
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, builder.block)
    index.add_incoming(following, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", following, count), loop, after)
    builder.position_at_end(after)
    return list(results)


def switch(builder: ir.IRBuilder, value: ir.Value, cases: dict[int, Callable[[], None]]) -> None:
    """Emit each case's code behind a switch on `value`; other values do nothing."""
    end = builder.append_basic_block("end")
    chosen = builder.switch(value, end)
    for number, emit in cases.items():
        block = builder.append_basic_block(f"case{number}")
        chosen.add_case(i64(number), block)
        builder.position_at_end(block)
        emit()
        builder.branch(end)
    builder.position_at_end(end)
