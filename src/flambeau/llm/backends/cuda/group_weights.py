"""How the Triton kernels read and widen weights that have a scale for each group of inputs.

8-bit numbers (fp8 of DeepSeek, integers) have the scales [N, K / GROUP] of groups; so have codes, which index a table
of 16 numbers (MXFP4, NVFP4, nf4). A byte has the codes of two inputs that are half a group apart: each half of the
bytes is multiplied with its own half of the inputs. Numbers of codes are found by instructions (code_instructions.py),
else in the table.

Levels of 4 to 6 bits (BITS; GGUF files) are pairs too. Their bits above the lower 4 are in another plane, `more`: see
cuda_groups.py. Without minimums the middle level stands for zero. Scales and minimums may be integers with a factor for
each SPAN inputs; with minimums, factors of both follow each other in turns.

Shapes: T rows · N outputs · K inputs
"""

from __future__ import annotations

import triton
import triton.language as tl

from flambeau.llm.backends.cuda.dequantize import widen, widen_pairs


@triton.jit  # type: ignore[untyped-decorator]
def joined_bits(pairs, more_rows, place, mask, GROUP: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pairs of levels of more than 4 bits, the first shifted by 8 bits; `place` is that of a pair in its row."""
    bits: tl.constexpr = BITS - 4
    size: tl.constexpr = GROUP * bits // 8  # bytes of a group
    half: tl.constexpr = GROUP // 2
    upper: tl.constexpr = (1 << bits) - 1
    octets = tl.load(more_rows + (place // half * size + place % half % size), mask=mask, other=0).to(tl.int32)
    octets = octets >> (place % half // size * bits)
    first = (pairs >> 4).to(tl.int32) | (octets & upper) << 4
    second = (pairs & 15).to(tl.int32) | (octets >> 4 & upper) << 4
    return first << 8 | second


@triton.jit  # type: ignore[untyped-decorator]
def levels_of(pairs, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and the second levels of pairs, in float32."""
    width: tl.constexpr = 8 if BITS > 4 else 4
    return (pairs >> width).to(tl.float32), (pairs & ((1 << width) - 1)).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def numbers_of(  # type: ignore[no-untyped-def]
    pairs, table_ptr, BITS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, FIRST_CODES: tl.constexpr,
    SECOND_CODES: tl.constexpr,
):  # fmt: skip
    """The first and the second numbers of pairs, in float32: levels, or codes by instructions or from the table."""
    if BITS > 0:
        first, second = levels_of(pairs, BITS)
        if not HAS_MINIMUMS:
            first -= 1 << (BITS - 1)
            second -= 1 << (BITS - 1)
    elif FIRST_CODES != "":
        first = tl.inline_asm_elementwise(FIRST_CODES, "=r,=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=4)
        second = tl.inline_asm_elementwise(SECOND_CODES, "=r,=r,r", [pairs], dtype=tl.bfloat16, is_pure=True, pack=4)
        first, second = first.to(tl.float32), second.to(tl.float32)
    else:
        first, second = tl.load(table_ptr + (pairs >> 4)), tl.load(table_ptr + (pairs & 15))
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def widen_codes(  # type: ignore[no-untyped-def]
    pairs, scales, table_ptr, dtype: tl.constexpr, FIRST_CODES: tl.constexpr, SECOND_CODES: tl.constexpr
):  # fmt: skip
    """The first and the second weights of pairs of codes, in the type of the inputs."""
    if FIRST_CODES != "":
        first = tl.inline_asm_elementwise(
            FIRST_CODES, "=r,=r,r,r,r", [pairs, scales], dtype=tl.bfloat16, is_pure=True, pack=4
        )
        second = tl.inline_asm_elementwise(
            SECOND_CODES, "=r,=r,r,r,r", [pairs, scales], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        first, second = numbers_of(pairs, table_ptr, 0, False, "", "")
        first, second = (first * scales.to(tl.float32)).to(dtype), (second * scales.to(tl.float32)).to(dtype)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def widen_levels(pairs, scales, minimums, dtype: tl.constexpr, BITS: tl.constexpr, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first and the second weights of pairs of levels, in the type of the inputs; scales are in float32."""
    if BITS == 4 and FAST:
        first, second = widen_pairs(pairs, scales.to(tl.bfloat16), minimums.to(tl.bfloat16), dtype, FAST)
    else:
        first, second = levels_of(pairs, BITS)
        first, second = (first * scales + minimums).to(dtype), (second * scales + minimums).to(dtype)
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def load_scales(  # type: ignore[no-untyped-def]
    scale_ptr, factor_ptr, n, group, mask, K: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    TURNS: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Scales, or minimums, of the groups of outputs n, in float32; theirs is one TURN of each of TURNS factors."""
    scales = tl.load(scale_ptr + n * (K // GROUP) + group, mask=mask, other=0.0).to(tl.float32)
    if SPAN > 0:
        at = factor_ptr + n * (K // SPAN * TURNS) + (group * GROUP // SPAN * TURNS + TURN)
        scales *= tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return scales


# ---- one row ----


@triton.jit  # type: ignore[untyped-decorator]
def load_row_inputs(x_ptr, start, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some inputs of one row; with PAIRS those of the first and of the second codes, else twice the same."""
    if PAIRS:
        half: tl.constexpr = GROUP // 2
        j = start // 2 + tl.arange(0, BLOCK // 2)
        place = j // half * GROUP + j % half
        first = tl.load(x_ptr + place, mask=j < K // 2, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + place + half, mask=j < K // 2, other=0.0).to(tl.float32)
    else:
        place = start + tl.arange(0, BLOCK)
        first = tl.load(x_ptr + place, mask=place < K, other=0.0).to(tl.float32)
        second = first
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def load_row_weights(  # type: ignore[no-untyped-def]
    weight_ptr, more_ptr, n, is_output, start, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Some weights of the outputs n [EACH, BLOCK], or pairs of them."""
    each: tl.constexpr = 2 if PAIRS else 1
    place = start // each + tl.arange(0, BLOCK // each)
    mask = is_output[:, None] & (place < K // each)[None, :]
    at = weight_ptr + n[:, None] * (K // each) + place[None, :]
    weights = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")
    if BITS > 4:
        weights = joined_bits(weights, more_ptr + n[:, None] * (K * (BITS - 4) // 8), place[None, :], mask, GROUP, BITS)
    return weights


@triton.jit  # type: ignore[untyped-decorator]
def load_row_scales(  # type: ignore[no-untyped-def]
    scale_ptr, minimum_ptr, factor_ptr, n, is_output, start, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    SPAN: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
):  # fmt: skip
    """Scales [EACH, BLOCK / GROUP], and minimums; without them twice the same."""
    group = start // GROUP + tl.arange(0, BLOCK // GROUP)
    mask = is_output[:, None] & (group < K // GROUP)[None, :]
    turns: tl.constexpr = 2 if HAS_MINIMUMS else 1
    scales = load_scales(scale_ptr, factor_ptr, n[:, None], group[None, :], mask, K, GROUP, SPAN, turns, 0)
    minimums = scales
    if HAS_MINIMUMS:
        minimums = load_scales(minimum_ptr, factor_ptr, n[:, None], group[None, :], mask, K, GROUP, SPAN, turns, 1)
    return scales, minimums


@triton.jit  # type: ignore[untyped-decorator]
def sums_of_groups(  # type: ignore[no-untyped-def]
    weights, scales, minimums, first, second, table_ptr, EACH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr, BITS: tl.constexpr, HAS_MINIMUMS: tl.constexpr, FIRST_CODES: tl.constexpr,
    SECOND_CODES: tl.constexpr,
):  # fmt: skip
    """The contribution of each group to each output [EACH, BLOCK / GROUP]; sums are scaled, not weights."""
    groups: tl.constexpr = BLOCK // GROUP
    if PAIRS:
        one, other = numbers_of(weights, table_ptr, BITS, HAS_MINIMUMS, FIRST_CODES, SECOND_CODES)
        products = one * first[None, :] + other * second[None, :]
        sums = tl.sum(tl.reshape(products, [EACH, groups, GROUP // 2]), 2) * scales
        if HAS_MINIMUMS:
            sums += minimums * tl.sum(tl.reshape(first + second, [groups, GROUP // 2]), 1)[None, :]
    else:
        products = weights.to(tl.float32) * first[None, :]
        sums = tl.sum(tl.reshape(products, [EACH, groups, GROUP]), 2) * scales
        if HAS_MINIMUMS:
            sums += minimums * tl.sum(tl.reshape(first, [groups, GROUP]), 1)[None, :]
    return sums


# ---- several rows ----


@triton.jit  # type: ignore[untyped-decorator]
def load_inputs(  # type: ignore[no-untyped-def]
    x_rows, is_row, start, K: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Some inputs of rows; with PAIRS those of the first and of the second codes [ROWS, BLOCK / 2], else the same."""
    if PAIRS:
        half: tl.constexpr = GROUP // 2
        j = start // 2 + tl.arange(0, BLOCK // 2)
        place = j // half * GROUP + j % half
        mask = is_row[:, None] & (j < K // 2)[None, :]
        first = tl.load(x_rows[:, None] + place[None, :], mask=mask, other=0.0)
        second = tl.load(x_rows[:, None] + (place + half)[None, :], mask=mask, other=0.0)
    else:
        place = start + tl.arange(0, BLOCK)
        mask = is_row[:, None] & (place < K)[None, :]
        first = tl.load(x_rows[:, None] + place[None, :], mask=mask, other=0.0)
        second = first
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def multiplied(sums, x, weights, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums with the products of inputs [ROWS, …] and weights [COLUMNS, …]; FIRST: sums are [COLUMNS, ROWS]."""
    if FIRST:
        sums = tl.dot(weights, tl.trans(x), sums, input_precision="ieee")
    else:
        sums = tl.dot(x, tl.trans(weights), sums, input_precision="ieee")
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def add_groups(  # type: ignore[no-untyped-def]
    sums, first_x, second_x, weight_ptr, more_ptr, scale_ptr, minimum_ptr, factor_ptr, table_ptr, n, is_column, start,
    K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr,
    BITS: tl.constexpr, SPAN: tl.constexpr, HAS_MINIMUMS: tl.constexpr, FIRST_CODES: tl.constexpr,
    SECOND_CODES: tl.constexpr, FAST: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The sums with the products of some inputs and the outputs n, which are of 64 bits."""
    groups: tl.constexpr = BLOCK // GROUP
    each: tl.constexpr = 2 if PAIRS else 1
    width: tl.constexpr = GROUP // each
    dtype: tl.constexpr = first_x.dtype
    g = start // GROUP + tl.arange(0, groups)
    turns: tl.constexpr = 2 if HAS_MINIMUMS else 1
    if groups == 1 and not PAIRS and not HAS_MINIMUMS:  # one scale for each output: sums are scaled
        place = start + tl.arange(0, BLOCK)
        mask = is_column[:, None] & (place < K)[None, :]
        at = weight_ptr + n[:, None] * K + place[None, :]
        weights = widen(tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first"), dtype, FAST)
        is_known = is_column & (start < K)
        scales = load_scales(scale_ptr, factor_ptr, n, start // GROUP, is_known, K, GROUP, SPAN, turns, 0)
        products = multiplied(tl.zeros_like(sums), first_x, weights, FIRST)
        sums += products * (scales[:, None] if FIRST else scales[None, :])
    else:
        is_group = is_column[:, None] & (g < K // GROUP)[None, :]
        place = g[:, None] * width + tl.arange(0, width)[None, :]
        at = weight_ptr + n[:, None, None] * (K // each) + place[None, :, :]
        loaded = tl.load(at, mask=is_group[:, :, None], other=0.0, eviction_policy="evict_first")
        if PAIRS and BITS == 0:
            scales = tl.load(scale_ptr + n[:, None] * (K // GROUP) + g[None, :], mask=is_group, other=0.0)[:, :, None]
            first, second = widen_codes(loaded, scales, table_ptr, dtype, FIRST_CODES, SECOND_CODES)
        else:
            scales = load_scales(
                scale_ptr, factor_ptr, n[:, None], g[None, :], is_group, K, GROUP, SPAN, turns, 0
            )[:, :, None]  # fmt: skip
            minimums = scales * -(1 << (BITS - 1)) if BITS > 0 else scales * 0.0
            if HAS_MINIMUMS:
                minimums = load_scales(
                    minimum_ptr, factor_ptr, n[:, None], g[None, :], is_group, K, GROUP, SPAN, turns, 1
                )[:, :, None]  # fmt: skip
            if PAIRS:
                if BITS > 4:
                    more_rows = more_ptr + n[:, None, None] * (K * (BITS - 4) // 8)
                    loaded = joined_bits(loaded, more_rows, place[None, :, :], is_group[:, :, None], GROUP, BITS)
                first, second = widen_levels(loaded, scales, minimums, dtype, BITS, FAST)
            else:
                first = loaded.to(tl.float32) * scales
                if HAS_MINIMUMS:
                    first += minimums
                first = first.to(dtype)
                second = first
        sums = multiplied(sums, first_x, tl.reshape(first, [COLUMNS, BLOCK // each]), FIRST)
        if PAIRS:
            sums = multiplied(sums, second_x, tl.reshape(second, [COLUMNS, BLOCK // 2]), FIRST)
    return sums
