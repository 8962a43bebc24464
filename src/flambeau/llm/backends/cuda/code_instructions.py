"""Instructions of NVIDIA GPUs that widen codes of 4 bits to bfloat16, four at a time; the plain version is a table.

Codes that are floating point numbers (e2m1, of MXFP4 and NVFP4) are widened by moving their bits. Other tables, such as
that of nf4, are in the instructions: permutations of bytes find the lower and the upper bytes of four numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.backends.cuda.dequantize import is_fast
from flambeau.llm.quantize.coded import CodeLayout

# The bits of e2m1 at their places in bfloat16 are too small by a factor of 2**126, which is 0x7E80.
FP4_START = """{
    .reg .b32 b, t, a, factor, none;
    mov.b32 factor, 0x7E807E80;
    mov.b32 none, 0x80008000;"""
FP4_STEP = """
    prmt.b32 b, $2, 0, SELECTOR;
    shr.u32 a, b, EXPONENT;
    shl.b32 t, b, SIGN;
    and.b32 a, a, 0x01C001C0;
    and.b32 t, t, 0x80008000;
    or.b32 a, a, t;
    fma.rn.bf16x2 a, a, factor, none;"""
# The lowest three bits of four codes select bytes of each half of the table; the fourth selects the half.
TABLE_START = """{
    .reg .b32 c, t, s, low, high, a, b, none;
    mov.b32 none, 0x80008000;
    shr.u32 c, $2, SHIFT;
    and.b32 c, c, 0x0F0F0F0F;
    shr.u32 t, c, 4;
    or.b32 c, c, t;
    prmt.b32 c, c, 0, 0x4420;
    shr.u32 s, c, 1;
    and.b32 s, s, 0x4444;
    or.b32 s, s, 0x3210;
    and.b32 c, c, 0x7777;"""
TABLE_PLANE = """
    mov.b32 a, WORD0;
    mov.b32 b, WORD1;
    prmt.b32 a, a, b, c;
    mov.b32 b, WORD2;
    mov.b32 t, WORD3;
    prmt.b32 b, b, t, c;
    prmt.b32 PLANE, a, b, s;"""
TABLE_STEP = """
    prmt.b32 a, low, high, SELECTOR;"""


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes of 4 bits as the kernels read them."""

    layout: CodeLayout
    table: Tensor  # [16], in float32


def formats(codes: Codes | None, scales: Tensor, dtype: torch.dtype, *, is_scaled: bool) -> dict[str, Any]:
    """What the kernels are compiled for: the instructions of codes; "": there are none, or the table is read."""
    is_known = codes is not None and is_fast(dtype) and scales.dtype == torch.bfloat16
    if codes is None or not is_known:
        return {"FIRST_CODES": "", "SECOND_CODES": ""}
    first, second = (instructions(codes.layout, is_high=is_high, is_scaled=is_scaled) for is_high in (True, False))
    return {"FIRST_CODES": first, "SECOND_CODES": second}


@functools.cache
def instructions(layout: CodeLayout, *, is_high: bool, is_scaled: bool) -> str:
    """For the upper or the lower halves of four bytes; with scales, these are operands too."""
    text = FP4_START if layout.is_fp4 else table_start(layout.table, is_high=is_high)
    for number, (bytes_of_fp4, bytes_of_planes) in enumerate((("0x1404", "0x5140"), ("0x3424", "0x7362"))):
        if layout.is_fp4:
            step = FP4_STEP.replace("EXPONENT", "6" if is_high else "2").replace("SIGN", "0" if is_high else "4")
            text += step.replace("SELECTOR", bytes_of_fp4)
        else:
            text += TABLE_STEP.replace("SELECTOR", bytes_of_planes)
        end = f"fma.rn.bf16x2 ${number}, a, ${3 + number}, none;" if is_scaled else f"mov.b32 ${number}, a;"
        text += f"\n    {end}"
    return text + "\n}"


def table_start(table: tuple[float, ...], *, is_high: bool) -> str:
    """The lower and the upper bytes of four numbers."""
    rounded = torch.tensor(table, dtype=torch.bfloat16, device="cpu").view(torch.int16)
    numbers = [each & 0xFFFF for each in rounded.tolist()]
    text = TABLE_START.replace("SHIFT", "4" if is_high else "0")
    for plane, shift in (("low", 0), ("high", 8)):
        part = TABLE_PLANE.replace("PLANE", plane)
        for word in range(4):
            octets = [number >> shift & 0xFF for number in numbers[4 * word : 4 * word + 4]]
            part = part.replace(f"WORD{word}", hex(int.from_bytes(octets, "little")))
        text += part
    return text
