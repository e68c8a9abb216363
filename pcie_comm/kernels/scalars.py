"""Arithmetic on integers, floats and bits, where the DSL has none or makes more of it than needed.

Nothing here touches memory; see primitives.py for that.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from .. import layout
from .primitives import asm


@dsl_user_op
def float_bits(value: Float32, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Reinterpret an fp32 as its bits."""
    return Uint32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def bits_float(value: Uint32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Reinterpret 32 bits as an fp32."""
    return Float32(llvm.bitcast(T.f32(), Uint32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def highest_bit(value: Uint32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Return the place of the highest bit that is set, 0 to 31. Requires: one is."""
    at = {"loc": loc, "ip": ip}
    operands = [Uint32(value).ir_value(**at)]
    return Int32(asm(T.i32(), operands, "bfind.u32 $0, $1;", "=r,r", effects=False, **at))


def select(condition: Any, chosen: Any, other: Any) -> Any:
    """Return `chosen` where `condition` holds, else `other`; both are evaluated, no branch."""
    return type(chosen)(cutlass.select_(condition, chosen, other))


def wide(value: Int32) -> Int64:
    """Return a non-negative integer in 64 bits: without a sign to extend, products are shorter."""
    return Int64(Uint32(value))


def maximum(left: Any, right: Any) -> Any:
    """Return the larger of two integers, no branch."""
    return select(left < right, right, left)


def minimum(left: Any, right: Any) -> Any:
    """Return the smaller of two integers, no branch."""
    return select(left < right, left, right)


def quotient(dividend: Int32, divisor: Int64) -> Int32:
    """Return a non-negative integer divided by what `layout.divisor` made of the divisor."""
    product = Uint64(Uint32(dividend)) * Uint64(Uint32(divisor))
    return Int32(product >> Uint64(divisor >> Int64(32)))


def quotient_by(dividend: Int32, divisor: int) -> Int32:
    """Return a non-negative integer divided by a number that is known when a kernel is compiled."""
    if divisor & (divisor - 1) == 0:
        return dividend >> Int32(divisor.bit_length() - 1)
    return quotient(dividend, Int64(layout.divisor(divisor)))


_COUNT = "{{\n.reg .pred p;\nsetp.gt.{} p, $1, $2;\nmov.u32 $0, $3;\n@p add.u32 $0, $0, 1;\n}}"


@dsl_user_op
def count_above(
    count: Uint32, value: Uint64, limit: Uint64, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """Return `count`, and one more if `value` > `limit`: one predicated add, no selection."""
    at = {"loc": loc, "ip": ip}
    text = _COUNT.format("u64")
    operands = [Uint64(value).ir_value(**at), Uint64(limit).ir_value(**at)]
    operands += [Uint32(count).ir_value(**at)]
    return Uint32(asm(T.i32(), operands, text, "=&r,l,l,r", effects=False, **at))


@dsl_user_op
def count_above_u32(
    count: Uint32, value: Uint32, limit: Uint32, *, loc: Any = None, ip: Any = None
) -> Uint32:
    """Return `count`, and one more if `value` > `limit`, for 32-bit integers."""
    at = {"loc": loc, "ip": ip}
    text = _COUNT.format("u32")
    operands = [Uint32(word).ir_value(**at) for word in (value, limit, count)]
    return Uint32(asm(T.i32(), operands, text, "=&r,r,r,r", effects=False, **at))


@dsl_user_op
def reciprocal_of_normal(value: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Return 1 / value, correctly rounded, for 1 <= value < 2**126.

    One Newton step on the approximation: what `rcp.rn` does in that range, without its branch.
    """
    at = {"loc": loc, "ip": ip}
    text = (
        "{\n.reg .f32 a;\n.reg .f32 b;\nrcp.approx.ftz.f32 a, $1;\nneg.f32 b, $1;\n"
        "fma.rn.f32 b, b, a, 0f3F800000;\nfma.rn.f32 $0, a, b, a;\n}"
    )
    operands = [Float32(value).ir_value(**at)]
    return Float32(asm(T.f32(), operands, text, "=f,f", effects=False, **at))


@dsl_user_op
def opaque(value: Float32, *, loc: Any = None, ip: Any = None) -> Float32:
    """Return `value`, which the compiler then knows nothing about: 1 / x stays a division."""
    at = {"loc": loc, "ip": ip}
    operands = [Float32(value).ir_value(**at)]
    return Float32(asm(T.f32(), operands, "mov.f32 $0, $1;", "=f,f", effects=False, **at))
