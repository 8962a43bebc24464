"""The quantized blocks of GGUF files as levels, scales and minimums of groups, exactly.

Shapes: R rows · B blocks of a row · Y bytes of a block · I inputs · N groups of a row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.llm.quantize.coded import FP4
from flambeau.llm.quantize.groups import GroupLayout

Decode = Callable[[Tensor], Tensor]
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # the levels of IQ4
TWICE_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of 4-bit floating point numbers


@dataclass(frozen=True, slots=True)
class FactoredScales:
    """The scales of the groups of a block: integers, which have a factor in common."""

    integers: Decode  # blocks [R, B, Y] → [R, B, groups of a block]
    factor: Decode  # blocks → [R, B]

    def __call__(self, blocks: Tensor) -> Tensor:
        """[R, N]."""
        return (self.integers(blocks).float() * self.factor(blocks).unsqueeze(2)).flatten(1)


@dataclass(frozen=True, slots=True)
class CodedForm:
    """A type whose levels are the numbers of a table, as codes and in units of another scale."""

    table: tuple[float, ...]
    codes: Decode  # blocks [R, B, Y] → [R, I]
    unit: float = 1.0  # of the levels, in numbers of the table
    has_wide_scales: bool = True


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a type stores weights."""

    num_bytes: int  # of a block
    layout: GroupLayout
    levels: Decode  # blocks [R, B, Y] → [R, I]
    scales: Decode  # blocks → [R, N]
    minimums: Decode | None = None  # blocks → [R, N]; None: the middle level stands for zero
    codes: CodedForm | None = None


def halves(values: Tensor) -> Tensor:
    """Pairs of bytes […, 2] as float16, widened: […]."""
    return values.contiguous().view(torch.float16).squeeze(-1).float()


def shifted(values: Tensor, *shifts: int, mask: int) -> Tensor:
    """Parts of bytes […, Y], one after the other: […, Y times the number of shifts]."""
    return torch.cat([values >> shift & mask for shift in shifts], dim=-1)


def nibbles(pairs: Tensor) -> Tensor:
    """Bytes […, Y] to numbers […, 2Y]: all lower halves, then all upper halves."""
    return shifted(pairs, 0, 4, mask=15)


def in_parts(values: Tensor, count: int) -> Tensor:
    """[R, B, …] to [R, B, count, …]."""
    return values.reshape(*values.shape[:2], count, -1)


def first_half(blocks: Tensor) -> Tensor:
    return halves(blocks[:, :, :2])


# ---- groups of 32 with numbers of their own ----


def fifth_bits(octets: Tensor) -> Tensor:
    """Four bytes […, 4] with a bit for each of 32 levels […, 32], in the place of their fifth bit."""
    bits = torch.stack([octets >> i & 1 for i in range(8)], dim=-1)
    return bits.flatten(-2) << 4


def q8_0_levels(blocks: Tensor) -> Tensor:
    return (blocks[:, :, 2:] ^ 128).flatten(1)


def q5_levels(blocks: Tensor, start: int) -> Tensor:
    return (nibbles(blocks[:, :, start + 4 :]) | fifth_bits(blocks[:, :, start : start + 4])).flatten(1)


def from_table(codes: Tensor, table: tuple[int, ...], middle: int) -> Tensor:
    """Levels by codes of 4 bits."""
    levels = torch.tensor([value + middle for value in table], dtype=torch.uint8)
    return levels[codes.int()]


def iq4_nl_codes(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, :, 2:]).flatten(1)


def mxfp4_codes(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, :, 1:]).flatten(1)


def mxfp4_scales(blocks: Tensor) -> Tensor:
    """Half of 2 to the power of a byte minus 127: the levels are doubled."""
    return torch.exp2(blocks[:, :, 0].double() - 128).float()


# ---- blocks of 256 with factors for the numbers of their groups ----


def six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and minimums [R, B, 8] of Q4_K and Q5_K as integers, from 12 bytes."""
    low, middle, high = torch.split(packed, 4, dim=2)
    scales = torch.cat((low & 63, high & 15 | (low >> 6) << 4), dim=2)
    return scales, torch.cat((middle & 63, high >> 4 | (middle >> 6) << 4), dim=2)


def second_half(blocks: Tensor) -> Tensor:
    return halves(blocks[:, :, 2:4])


K_SCALES = FactoredScales(lambda blocks: six_bits(blocks[:, :, 4:16])[0], first_half)
K_MINIMUMS = FactoredScales(lambda blocks: six_bits(blocks[:, :, 4:16])[1], lambda blocks: -second_half(blocks))


def q4_k_levels(blocks: Tensor) -> Tensor:
    return nibbles(in_parts(blocks[:, :, 16:], 4)).flatten(1)


def q5_k_levels(blocks: Tensor) -> Tensor:
    """A byte with the fifth bits has those of the same place in eight groups."""
    upper = torch.stack([(blocks[:, :, 16:48] >> group & 1) << 4 for group in range(8)], dim=2)
    return (nibbles(in_parts(blocks[:, :, 48:], 4)) | in_parts(upper.flatten(2), 4)).flatten(1)


def q6_k_levels(blocks: Tensor) -> Tensor:
    lower = nibbles(in_parts(blocks[:, :, :128], 2))
    upper = shifted(in_parts(blocks[:, :, 128:192], 2), 0, 2, 4, 6, mask=3)
    return (lower | upper << 4).flatten(1)


Q6_K_SCALES = FactoredScales(
    lambda blocks: blocks[:, :, 192:208].contiguous().view(torch.int8), lambda blocks: halves(blocks[:, :, 208:])
)


def q3_k_levels(blocks: Tensor) -> Tensor:
    """Numbers from -4 to 3 around the middle of 4 bits; a byte with the third bits has those of eight groups of 32."""
    third = torch.stack([blocks[:, :, :32] >> group & 1 for group in range(8)], dim=2).flatten(2)
    lower = shifted(in_parts(blocks[:, :, 32:96], 2), 0, 2, 4, 6, mask=3).flatten(2)
    return (lower + 4 * third + 4).flatten(1)


def q3_k_integers(blocks: Tensor) -> Tensor:
    packed = blocks[:, :, 96:108]
    return (nibbles(packed[:, :, :8]) | shifted(packed[:, :, 8:], 0, 2, 4, 6, mask=3) << 4).to(torch.int8) - 32


Q3_K_SCALES = FactoredScales(q3_k_integers, lambda blocks: halves(blocks[:, :, 108:]))


def q2_k_levels(blocks: Tensor) -> Tensor:
    return shifted(in_parts(blocks[:, :, 16:80], 2), 0, 2, 4, 6, mask=3).flatten(1)


Q2_K_SCALES = FactoredScales(lambda blocks: blocks[:, :, :16] & 15, lambda blocks: halves(blocks[:, :, 80:82]))
Q2_K_MINIMUMS = FactoredScales(lambda blocks: blocks[:, :, :16] >> 4, lambda blocks: -halves(blocks[:, :, 82:]))


def iq4_xs_codes(blocks: Tensor) -> Tensor:
    return nibbles(in_parts(blocks[:, :, 8:], 8)).flatten(1)


def iq4_xs_scales(blocks: Tensor) -> Tensor:
    lower = torch.stack((blocks[:, :, 4:8] & 15, blocks[:, :, 4:8] >> 4), dim=3).flatten(2)
    upper = torch.stack([blocks[:, :, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=3).flatten(2)
    return (((lower | upper << 4).float() - 32) * first_half(blocks).unsqueeze(2)).flatten(1)


def tq2_0_levels(blocks: Tensor) -> Tensor:
    """Numbers from -1 to 1 around the middle of 4 bits."""
    return (shifted(in_parts(blocks[:, :, :64], 2), 0, 2, 4, 6, mask=3) + 7).flatten(1)


def base_3_digits(octets: Tensor, count: int) -> Tensor:
    """The first digits of bytes [R, B, Y], one after the other [R, B, count * Y]; a byte is a fraction of 256."""
    return torch.cat([(octets.int() * 3**place % 256 * 3) >> 8 for place in range(count)], dim=-1)


def tq1_0_levels(blocks: Tensor) -> Tensor:
    parts = ((blocks[:, :, :32], 5), (blocks[:, :, 32:48], 5), (blocks[:, :, 48:52], 4))
    return (torch.cat([base_3_digits(*part) for part in parts], dim=-1) + 7).to(torch.uint8).flatten(1)


def last_half(blocks: Tensor) -> Tensor:
    """One scale of a block for all eight groups of 32."""
    return halves(blocks[:, :, -2:]).repeat_interleave(8, dim=1)


IQ4_TABLE = tuple(map(float, NONLINEAR))
FORMATS = {
    "Q4_0": BlockFormat(18, GroupLayout(4, 32), lambda blocks: nibbles(blocks[:, :, 2:]).flatten(1), first_half),
    "Q4_1": BlockFormat(
        20, GroupLayout(4, 32, True), lambda blocks: nibbles(blocks[:, :, 4:]).flatten(1), first_half, second_half
    ),
    "Q5_0": BlockFormat(22, GroupLayout(5, 32), lambda blocks: q5_levels(blocks, 2), first_half),
    "Q5_1": BlockFormat(24, GroupLayout(5, 32, True), lambda blocks: q5_levels(blocks, 4), first_half, second_half),
    "Q8_0": BlockFormat(34, GroupLayout(8, 32), q8_0_levels, first_half),
    "Q2_K": BlockFormat(84, GroupLayout(4, 16, True), q2_k_levels, Q2_K_SCALES, Q2_K_MINIMUMS),
    "Q3_K": BlockFormat(110, GroupLayout(4, 16), q3_k_levels, Q3_K_SCALES),
    "Q4_K": BlockFormat(144, GroupLayout(4, 32, True), q4_k_levels, K_SCALES, K_MINIMUMS),
    "Q5_K": BlockFormat(176, GroupLayout(5, 32, True), q5_k_levels, K_SCALES, K_MINIMUMS),
    "Q6_K": BlockFormat(210, GroupLayout(6, 16), q6_k_levels, Q6_K_SCALES),
    "TQ1_0": BlockFormat(54, GroupLayout(4, 32), tq1_0_levels, last_half),
    "TQ2_0": BlockFormat(66, GroupLayout(4, 32), tq2_0_levels, last_half),
    "IQ4_NL": BlockFormat(
        18,
        GroupLayout(8, 32),
        lambda blocks: from_table(iq4_nl_codes(blocks), NONLINEAR, 128),
        first_half,
        codes=CodedForm(IQ4_TABLE, iq4_nl_codes),
    ),
    "IQ4_XS": BlockFormat(
        136,
        GroupLayout(8, 32),
        lambda blocks: from_table(iq4_xs_codes(blocks), NONLINEAR, 128),
        iq4_xs_scales,
        codes=CodedForm(IQ4_TABLE, iq4_xs_codes),
    ),
    "MXFP4": BlockFormat(
        17,
        GroupLayout(5, 32),
        lambda blocks: from_table(mxfp4_codes(blocks), TWICE_FP4, 16),
        mxfp4_scales,
        codes=CodedForm(FP4, mxfp4_codes, unit=2.0, has_wide_scales=False),
    ),
}
