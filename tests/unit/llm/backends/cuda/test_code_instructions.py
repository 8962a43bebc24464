"""The instructions that widen codes, one by one as the GPU's manual describes them."""

from __future__ import annotations

import re

import pytest
import torch

from flambeau.llm.quantize.coded import FP4, CodeLayout

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda.code_instructions import Codes, formats, instructions

NF4_LIKE = tuple(round((i - 7.3) / 8.1, 4) for i in range(16))
MASK = (1 << 32) - 1


def bfloat16s(word):
    """The two numbers of a word."""
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.bfloat16)


def word_of(numbers):
    low, high = numbers.to(torch.bfloat16).view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def permuted(first, second, selector):
    """prmt: each digit of the selector names a byte; its highest bit would copy the sign instead."""
    octets = (first | second << 32).to_bytes(8, "little")
    digits = [selector >> shift & 15 for shift in (0, 4, 8, 12)]
    assert max(digits) < 8
    return int.from_bytes(bytes(octets[digit] for digit in digits), "little")


def run(text, operands):
    """The registers after some instructions."""
    registers = dict(operands)

    def value(name):
        return registers[name] if name in registers else int(name, 0)

    for line in re.findall(r"[^;{}]+;", text):
        operation, _, rest = line.strip().rstrip(";").partition(" ")
        if operation == ".reg":
            continue
        target, *given = [part.strip() for part in rest.split(",")]
        numbers = [value(name) for name in given]
        results = {
            "mov.b32": lambda a: a,
            "and.b32": lambda a, b: a & b,
            "or.b32": lambda a, b: a | b,
            "shr.u32": lambda a, b: a >> b,
            "shl.b32": lambda a, b: a << b & MASK,
            "prmt.b32": permuted,
            "fma.rn.bf16x2": lambda a, b, c: word_of(
                bfloat16s(a).double() * bfloat16s(b).double() + bfloat16s(c).double()
            ),
        }
        registers[target] = results[operation](*numbers)
    return registers


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("is_high", [False, True])
@pytest.mark.parametrize("table", [FP4, NF4_LIKE])
def test_all_codes(table, is_high, is_scaled):
    text = instructions(CodeLayout(table, 32), is_high=is_high, is_scaled=is_scaled)
    scales = torch.tensor([0.5, 2.0, 0.25, 4.0])
    for start in range(0, 256, 4):
        octets = bytes(range(start, start + 4))
        operands = {"$2": int.from_bytes(octets, "little"), "$3": word_of(scales[:2]), "$4": word_of(scales[2:])}
        found = run(text, operands)
        codes = torch.tensor([octet >> 4 if is_high else octet & 15 for octet in octets])
        expected = torch.tensor(table).to(torch.bfloat16).float()[codes] * (scales if is_scaled else 1.0)
        assert torch.cat((bfloat16s(found["$0"]), bfloat16s(found["$1"]))).float().tolist() == expected.tolist()


def test_tables_are_read_where_instructions_are_not_exact():
    codes = Codes(CodeLayout(FP4, 32), torch.tensor(FP4))
    for scale_dtype, dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        found = formats(codes, torch.ones(1, dtype=scale_dtype), dtype, is_scaled=True)
        assert found == {"FIRST_CODES": "", "SECOND_CODES": ""}
    assert formats(None, torch.ones(1), torch.bfloat16, is_scaled=False)["FIRST_CODES"] == ""
