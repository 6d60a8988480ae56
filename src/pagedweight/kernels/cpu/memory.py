"""Raw memory inside compiled code: arrays over addresses, a shared counter, 16-bit floats."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from pagedweight.kernels.cpu.ir import F32, HALF, I16, I64
from pagedweight.kernels.cpu.machine import cached_here


@intrinsic
def _pointer(typingctx, address):  # type: ignore[no-untyped-def]
    """int64 address to a void pointer."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def fetch_add(typingctx, address, amount):  # type: ignore[no-untyped-def]
    """Add to the int64 at `address` and return what was there: how threads share out tasks."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def half_to_float(typingctx, bits):  # type: ignore[no-untyped-def]
    """float16 bit pattern (uint16) to float32, exact."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(args[0], HALF), F32)

    return types.float32(types.uint16), codegen


@intrinsic
def float_to_half(typingctx, value):  # type: ignore[no-untyped-def]
    """float32 to the nearest float16 (ties to even), as a uint16 bit pattern."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(builder.fptrunc(args[0], HALF), I16)

    return types.uint16(types.float32), codegen


@intrinsic
def float_of(typingctx, bits):  # type: ignore[no-untyped-def]
    """The float32 with this uint32 bit pattern."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], F32)

    return types.float32(types.uint32), codegen


@intrinsic
def bits_of(typingctx, value):  # type: ignore[no-untyped-def]
    """The uint32 bit pattern of a float32."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


with cached_here():

    @njit(cache=True, inline="always")
    def floats_at(address, count):
        return carray(_pointer(address), (count,), np.float32)

    @njit(cache=True, inline="always")
    def shorts_at(address, count):
        return carray(_pointer(address), (count,), np.uint16)

    @njit(cache=True, inline="always")
    def ints_at(address, count):
        return carray(_pointer(address), (count,), np.int32)

    @njit(cache=True, inline="always")
    def longs_at(address, count):
        return carray(_pointer(address), (count,), np.int64)

    @njit(cache=True)
    def bf16_to_float(bits):
        """bfloat16 bit pattern (uint16) to float32, exact."""
        return float_of(np.uint32(bits) << np.uint32(16))

    @njit(cache=True)
    def float_to_bf16(value):
        """float32 to the nearest bfloat16 (ties to even) as uint16; every NaN is one quiet NaN."""
        bits = bits_of(value)
        rounded = (
            bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        ) >> np.uint32(16)
        return np.uint16(rounded) if value == value else np.uint16(0x7FC0)
