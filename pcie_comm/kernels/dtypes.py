"""Words of 32 bits as numbers, and back: bf16, fp16 and fp32. Rounding is to nearest even."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from . import scalars as num
from .primitives import asm


@dsl_user_op
def _halves(word: Uint32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, Float32]:
    """Return two fp16 as fp32."""
    at = {"loc": loc, "ip": ip}
    text = (
        "{\n.reg .b16 a;\n.reg .b16 b;\nmov.b32 {a, b}, $2;\n"
        "cvt.f32.f16 $0, a;\ncvt.f32.f16 $1, b;\n}"
    )
    operands = [Uint32(word).ir_value(**at)]
    kind = llvm.StructType.get_literal([T.f32(), T.f32()])
    pair = asm(kind, operands, text, "=f,=f,r", effects=False, **at)
    low, high = (llvm.extractvalue(T.f32(), pair, [i], **at) for i in range(2))
    return Float32(low), Float32(high)


@dsl_user_op
def _rounded(low: Float32, high: Float32, kind: str, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Return two fp32 as a word of `bf16x2` or `f16x2`."""
    at = {"loc": loc, "ip": ip}
    operands = [Float32(value).ir_value(**at) for value in (high, low)]
    text = f"cvt.rn.{kind}.f32 $0, $1, $2;"
    return Uint32(asm(T.i32(), operands, text, "=r,f,f", effects=False, **at))


def unpack(words: tuple, dtype: str) -> list:
    """Return the numbers in words, in memory order."""
    if dtype == "float32":
        return [num.bits_float(word) for word in words]
    if dtype == "float16":
        return [half for word in words for half in _halves(word)]
    pairs = [(word << Uint32(16), word & Uint32(0xFFFF0000)) for word in words]
    return [num.bits_float(bits) for pair in pairs for bits in pair]


def pack(values: list, dtype: str) -> tuple:
    """Return numbers as words, rounded to `dtype`."""
    if dtype == "float32":
        return tuple(num.float_bits(value) for value in values)
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    pairs = zip(values[::2], values[1::2], strict=True)
    return tuple(_rounded(low, high, kind) for low, high in pairs)
