"""4-bit weights and 8-bit floating point numbers to bfloat16, four at a time; the plain versions are conversions.

Kernels for several rows are bound by these instructions. A level becomes the last digits of 128, which is then
subtracted; the bits of a floating point number are moved to their places. For int8 the compiler's own conversion is
faster than such a trick.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# 128 + level for each of four levels, minus 128, times the scale plus the minimum.
LEVELS = """
    prmt.b32 a, t, 0x43434343, 0x4140;
    prmt.b32 b, t, 0x43434343, 0x4342;
    mov.b32 one, 0x3F803F80;
    mov.b32 less, 0xC300C300;
    fma.rn.bf16x2 a, a, one, less;
    fma.rn.bf16x2 b, b, one, less;
    fma.rn.bf16x2 $0, a, $3, $5;
    fma.rn.bf16x2 $1, b, $4, $6;
}"""
LOW = tl.constexpr("{ .reg .b32 t, a, b, one, less; and.b32 t, $2, 0x0F0F0F0F;" + LEVELS)
HIGH = tl.constexpr("{ .reg .b32 t, a, b, one, less; shr.u32 t, $2, 4; and.b32 t, t, 0x0F0F0F0F;" + LEVELS)
# The exponent's bits moved to the end of the wider exponent: too small by a factor of 2**120.
FP8 = tl.constexpr("""{
    .reg .b32 t, a, factor, none;
    mov.b32 factor, 0x7B807B80;
    mov.b32 none, 0x80008000;
    prmt.b32 t, $2, 0, 0x1404;
    shr.u32 a, t, 4;
    and.b32 a, a, 0x07F007F0;
    and.b32 t, t, 0x80008000;
    or.b32 a, a, t;
    fma.rn.bf16x2 $0, a, factor, none;
    prmt.b32 t, $2, 0, 0x3424;
    shr.u32 a, t, 4;
    and.b32 a, a, 0x07F007F0;
    and.b32 t, t, 0x80008000;
    or.b32 a, a, t;
    fma.rn.bf16x2 $1, a, factor, none;
}""")


def is_fast(dtype: torch.dtype) -> bool:
    """Whether weights can be widened to this type here: bfloat16 on an NVIDIA GPU."""
    return dtype == torch.bfloat16 and not IS_INTERPRETED and torch.version.hip is None


@triton.jit  # type: ignore[untyped-decorator]
def widen(weights, dtype: tl.constexpr, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Weights in the type of the inputs."""
    if FAST and weights.dtype == tl.float8e4nv:
        wide = tl.inline_asm_elementwise(FP8, "=r,=r,r", [weights], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = weights.to(dtype)
    return wide


@triton.jit  # type: ignore[untyped-decorator]
def widen_pairs(pairs, scale, minimum, dtype: tl.constexpr, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and the second weights of pairs of 4 bits, in the type of the inputs."""
    if FAST:
        first = tl.inline_asm_elementwise(
            HIGH, "=r,=r,r,r,r,r,r", [pairs, scale, minimum], dtype=tl.bfloat16, is_pure=True, pack=4
        )
        second = tl.inline_asm_elementwise(
            LOW, "=r,=r,r,r,r,r,r", [pairs, scale, minimum], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        scale, minimum = scale.to(tl.float32), minimum.to(tl.float32)
        first = ((pairs >> 4).to(tl.float32) * scale + minimum).to(dtype)
        second = ((pairs & 15).to(tl.float32) * scale + minimum).to(dtype)
    return first, second
