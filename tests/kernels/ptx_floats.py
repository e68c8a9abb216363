"""fp32, bf16 and fp16 arithmetic of PTX on bit patterns, for ptx_machine.

In float64 and rounded once: exact for one operation, and for a fused multiply-add but for the
rarest double rounding.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np

FLUSHED = 2.0**-126


def value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits(number: float) -> int:
    try:
        return struct.unpack("<I", struct.pack("<f", number))[0]
    except OverflowError:
        return 0xFF800000 if number < 0 else 0x7F800000


def _two(operation: Callable[[float, float], float]) -> Callable[[int, int], int]:
    return lambda a, b: bits(operation(value(a), value(b)))


def _divide(a: float, b: float) -> float:
    if b == 0 or math.isnan(a) or math.isnan(b):
        if a == 0 or math.isnan(a) or math.isnan(b):
            return math.nan
        return math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


def _times(a: float, b: float) -> float:
    return a * b


def _number(choose: Callable[[float, float], float]) -> Callable[[int, int], int]:
    def of(a: int, b: int) -> int:
        x, y = value(a), value(b)
        if math.isnan(x) or math.isnan(y):
            return b if math.isnan(x) else a
        return bits(choose(x, y))

    return of


add_f32 = add_rn_f32 = _two(lambda a, b: a + b)
sub_f32 = sub_rn_f32 = _two(lambda a, b: a - b)
mul_f32 = mul_rn_f32 = _two(_times)
div_rn_f32 = _two(_divide)
max_f32, min_f32 = _number(max), _number(min)


def fma_rn_f32(a: int, b: int, c: int) -> int:
    return bits(value(a) * value(b) + value(c))


def _toward(number: float, direction: float) -> int:
    """Round to the fp32 next to a float64 in a direction."""
    if math.isnan(number) or math.isinf(number):
        return bits(number)
    rounded = np.float32(number)
    if (direction < 0 and rounded > number) or (direction > 0 and rounded < number):
        rounded = np.nextafter(rounded, np.float32(direction))
    return bits(float(rounded))


def fma_rm_f32(a: int, b: int, c: int) -> int:
    return _toward(value(a) * value(b) + value(c), -math.inf)


def add_rz_f32(a: int, b: int) -> int:
    total = value(a) + value(b)
    return _toward(total, -math.inf if total > 0 else math.inf)


def neg_f32(a: int) -> int:
    return a ^ 0x80000000


def abs_f32(a: int) -> int:
    return a & 0x7FFFFFFF


def copysign_f32(a: int, b: int) -> int:
    return (a & 0x80000000) | (b & 0x7FFFFFFF)


def _flushed(number: float) -> float:
    return math.copysign(0.0, number) if abs(number) < FLUSHED else number


def ex2_approx_ftz_f32(a: int) -> int:
    x = value(a)
    if math.isnan(x):
        return bits(x)
    return bits(math.inf if x >= 128 else _flushed(2.0**x) if x > -200 else 0.0)


def rcp_approx_ftz_f32(a: int) -> int:
    return bits(_flushed(_divide(1.0, _flushed(value(a)))))


rcp_rn_f32 = lambda a: bits(_divide(1.0, value(a)))  # noqa: E731


def sqrt_rn_f32(a: int) -> int:
    x = value(a)
    return bits(math.sqrt(x) if x >= 0 else x if x == 0 else math.nan)


def rsqrt_approx_ftz_f32(a: int) -> int:
    return bits(_divide(1.0, math.sqrt(_flushed(value(a)))))


def compare(how: str, a: int, b: int) -> int:
    x, y = value(a), value(b)
    unordered = math.isnan(x) or math.isnan(y)
    if how in ("num", "nan"):
        return int(unordered == (how == "nan"))
    if unordered:
        return int(how.endswith("u") and how != "u" and len(how) == 3)
    how = how[:2]
    answers = {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}
    return int(answers[how])


def cvt_sat_f32_f32(a: int) -> int:
    x = value(a)
    return bits(0.0 if math.isnan(x) else min(max(x, 0.0), 1.0))


def cvt_rn_f32_s32(a: int) -> int:
    return bits(float((a ^ 0x80000000) - 0x80000000))


def cvt_rn_f32_u32(a: int) -> int:
    return bits(float(a))


def cvt_f32_bf16(a: int) -> int:
    return (a & 0xFFFF) << 16


def cvt_f32_f16(a: int) -> int:
    return bits(struct.unpack("<e", struct.pack("<H", a & 0xFFFF))[0])


def cvt_rn_bf16_f32(a: int) -> int:
    if math.isnan(value(a)):
        return 0x7FFF
    return ((a + 0x7FFF + ((a >> 16) & 1)) >> 16) & 0xFFFF


def cvt_rn_bf16x2_f32(high: int, low: int) -> int:
    return cvt_rn_bf16_f32(high) << 16 | cvt_rn_bf16_f32(low)


def cvt_rn_f16x2_f32(high: int, low: int) -> int:
    return cvt_rn_f16_f32(high) << 16 | cvt_rn_f16_f32(low)


def cvt_rn_f16_f32(a: int) -> int:
    with np.errstate(over="ignore"):
        return int(np.float32(value(a)).astype(np.float16).view(np.uint16))
