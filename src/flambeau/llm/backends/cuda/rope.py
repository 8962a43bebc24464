"""What happens to queries and keys before attention, and the write of keys and values to the cache, in one kernel.

Queries and keys may be normalized before or after they are rotated, and clipped. Of each head, `ROTARY` numbers are
rotated. They are read as pairs: those that are rotated together, then the first and the second half of the rest.

Shapes: T tokens of the step · H heads · G key-value heads · D head size · P blocks · K tokens of a block · S parts of
a sum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import overlap_options, wait_for_previous

HEADS_EACH = 16  # of a program: fewer leave the memory waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """What happens to the queries and keys of a layer before attention."""

    tables: tuple[Tensor, Tensor] | None = None  # cosine and sine of positions; None: no rotary positions
    rotary_size: int = 0  # the numbers of a head that are rotated; 0: all
    gains: tuple[Tensor, Tensor] | None = None  # of queries and keys: [D], or [H, D] and [G, D]; None: no norms
    biases: tuple[Tensor, Tensor] | None = None  # of layer norms
    is_late: bool = False  # norms after the rotation
    epsilon: float = 0.0
    clip: float = 0.0  # the largest absolute value in queries, keys and values; 0: none
    # Queries grow by the scale times a logarithm each time that so many tokens have passed; 0: they do not.
    temperature_length: int = 0
    temperature_scale: float = 0.0
    temperature_first: float = 0.0  # what is added to positions

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        none = None, None
        return *(self.tables or none), *(self.gains or none), *(self.biases or none)

    def only_rotates(self, size: int) -> bool:
        """Whether all numbers of heads of this size are rotated, and nothing else happens to them."""
        is_rotated = self.tables is not None and self.rotary_size in (0, size)
        return is_rotated and self.gains is None and not self.clip and not self.temperature_length

    def options(self, size: int) -> dict[str, Any]:
        """What the kernels are compiled for, with heads of this size."""
        return {
            "ROTARY": self.rotary_size or size,
            "ROTATES": self.tables is not None,
            "NORMALIZES": self.gains is not None,
            "OWN_GAINS": self.gains is not None and self.gains[0].dim() == 2,
            "CENTERED": self.biases is not None,
            "LATE": self.is_late,
            "CLIP": self.clip,
            "TEMPERED": self.temperature_length,
            "TEMPERATURE": self.temperature_scale,
            "TEMPERED_FROM": self.temperature_first,
        }


@triton.jit  # type: ignore[untyped-decorator]
def first_places(d, SIZE: tl.constexpr, ROTARY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the first of the pairs d of a head are."""
    if ROTARY == SIZE:
        place = d
    else:
        place = tl.where(d < ROTARY // 2, d, d + ROTARY // 2)
    return place


@triton.jit  # type: ignore[untyped-decorator]
def second_places(d, SIZE: tl.constexpr, ROTARY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the second of the pairs d of a head are."""
    if ROTARY == SIZE:
        place = d + SIZE // 2
    else:
        place = tl.where(d < ROTARY // 2, d + ROTARY // 2, d + SIZE // 2)
    return place


@triton.jit  # type: ignore[untyped-decorator]
def clipped(x, CLIP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Not a number stays."""
    return tl.where(x > CLIP, CLIP, tl.where(x < -CLIP, -CLIP, x))


@triton.jit  # type: ignore[untyped-decorator]
def tempered(  # type: ignore[no-untyped-def]
    x, y, position, dtype: tl.constexpr, LENGTH: tl.constexpr, SCALE: tl.constexpr, FIRST: tl.constexpr
):  # fmt: skip
    """Queries at a position, as `rope.query_scale` scales them."""
    scale = tl.log(1.0 + tl.floor((position.to(tl.float32) + FIRST) / LENGTH)) * SCALE + 1.0
    return x.to(dtype).to(tl.float32) * scale, y.to(dtype).to(tl.float32) * scale


@triton.jit  # type: ignore[untyped-decorator]
def load_gains(gain_ptr, head, place, is_pair, is_known, SIZE: tl.constexpr, OWN_GAINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weights of the places of each head [heads, D/2], or of all heads [1, D/2]."""
    if OWN_GAINS:
        gain = tl.load(gain_ptr + head * SIZE + place[None, :], mask=is_known, other=0.0).to(tl.float32)
    else:
        gain = tl.load(gain_ptr + place, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    return gain


@triton.jit  # type: ignore[untyped-decorator]
def normalize_heads(  # type: ignore[no-untyped-def]
    x, y, gain_ptr, bias_ptr, head, first, second, is_pair, is_known, epsilon, dtype: tl.constexpr,
    SIZE: tl.constexpr, OWN_GAINS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """The two numbers [heads, D/2] of the pairs of each head, normalized; `first` and `second` [D/2] say where."""
    if CENTERED:
        mean = ((tl.sum(x, 1) + tl.sum(y, 1)) / SIZE)[:, None]
        x, y = tl.where(is_known, x - mean, 0.0), tl.where(is_known, y - mean, 0.0)
    root = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / SIZE + epsilon)[:, None]
    x = x * root * load_gains(gain_ptr, head, first, is_pair, is_known, SIZE, OWN_GAINS)
    y = y * root * load_gains(gain_ptr, head, second, is_pair, is_known, SIZE, OWN_GAINS)
    if CENTERED:
        x += load_gains(bias_ptr, head, first, is_pair, is_known, SIZE, OWN_GAINS)
        y += load_gains(bias_ptr, head, second, is_pair, is_known, SIZE, OWN_GAINS)
    return x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def normalize_head(  # type: ignore[no-untyped-def]
    x, y, gain_ptr, bias_ptr, head, first, second, is_pair, epsilon, dtype: tl.constexpr,
    SIZE: tl.constexpr, OWN_GAINS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """The same for one head."""
    if CENTERED:
        mean = (tl.sum(x, 0) + tl.sum(y, 0)) / SIZE
        x, y = tl.where(is_pair, x - mean, 0.0), tl.where(is_pair, y - mean, 0.0)
    root = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / SIZE + epsilon)
    if OWN_GAINS:
        first, second = head * SIZE + first, head * SIZE + second
    x = x * root * tl.load(gain_ptr + first, mask=is_pair, other=0.0).to(tl.float32)
    y = y * root * tl.load(gain_ptr + second, mask=is_pair, other=0.0).to(tl.float32)
    if CENTERED:
        x += tl.load(bias_ptr + first, mask=is_pair, other=0.0).to(tl.float32)
        y += tl.load(bias_ptr + second, mask=is_pair, other=0.0).to(tl.float32)
    return x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def normalize_qk(  # type: ignore[no-untyped-def]
    x, y, q_gain_ptr, k_gain_ptr, q_bias_ptr, k_bias_ptr, head, first, second, is_pair, epsilon, dtype: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, OWN_GAINS: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """The same for heads of queries and, after them, of keys."""
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    q_x, q_y = normalize_heads(
        x, y, q_gain_ptr, q_bias_ptr, head, first, second, is_pair, is_query & is_pair[None, :], epsilon, dtype,
        SIZE, OWN_GAINS, CENTERED,
    )  # fmt: skip
    k_x, k_y = normalize_heads(
        x, y, k_gain_ptr, k_bias_ptr, head - HEADS, first, second, is_pair, is_key & is_pair[None, :], epsilon, dtype,
        SIZE, OWN_GAINS, CENTERED,
    )  # fmt: skip
    return tl.where(is_query, q_x, k_x), tl.where(is_query, q_y, k_y)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def rope_and_cache(  # type: ignore[no-untyped-def]
    qkv_ptr, q_ptr, keys_ptr, values_ptr, positions_ptr, slots_ptr,
    cos_ptr, sin_ptr, q_gain_ptr, k_gain_ptr, q_bias_ptr, k_bias_ptr, epsilon, T,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF_PADDED: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, ROTARY: tl.constexpr, ROTATES: tl.constexpr, NORMALIZES: tl.constexpr,
    OWN_GAINS: tl.constexpr, CENTERED: tl.constexpr, LATE: tl.constexpr, CLIP: tl.constexpr, TEMPERED: tl.constexpr,
    TEMPERATURE: tl.constexpr, TEMPERED_FROM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """A few heads of one token: queries, keys or values."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = SIZE // 2
    half_rotary: tl.constexpr = ROTARY // 2
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    dtype = q_ptr.dtype.element_ty
    head = (tl.program_id(1) * EACH + tl.arange(0, EACH))[:, None]
    flat_d = tl.arange(0, HALF_PADDED)
    d = flat_d[None, :]
    is_pair = d < half
    is_known = (head < all_heads) & is_pair
    flat_first, flat_second = first_places(flat_d, SIZE, ROTARY), second_places(flat_d, SIZE, ROTARY)
    first_d, second_d = first_places(d, SIZE, ROTARY), second_places(d, SIZE, ROTARY)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    wait_for_previous(OVERLAPS)
    first = tl.zeros([EACH, HALF_PADDED], tl.float32)
    second = tl.zeros([EACH, HALF_PADDED], tl.float32)
    for part in tl.static_range(PARTS):
        at = qkv_ptr + ((part * T + token) * all_heads + head) * SIZE
        first += tl.load(at + first_d, mask=is_known, other=0.0).to(tl.float32)
        second += tl.load(at + second_d, mask=is_known, other=0.0).to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    x, y = first, second
    if NORMALIZES and not LATE:
        x, y = normalize_qk(
            x, y, q_gain_ptr, k_gain_ptr, q_bias_ptr, k_bias_ptr, head, flat_first, flat_second, flat_d < half,
            epsilon, dtype, HEADS, KV_HEADS, SIZE, OWN_GAINS, CENTERED,
        )  # fmt: skip
    if CLIP > 0:
        x, y, first, second = clipped(x, CLIP), clipped(y, CLIP), clipped(first, CLIP), clipped(second, CLIP)
    if ROTATES:
        no_turn: tl.constexpr = 0.0 if ROTARY == SIZE else 1.0  # the cosine of what is not rotated
        cos = tl.load(cos_ptr + position * half_rotary + d, mask=d < half_rotary, other=no_turn)
        sin = tl.load(sin_ptr + position * half_rotary + d, mask=d < half_rotary, other=0.0)
        x, y = x * cos - y * sin, y * cos + x * sin
    if NORMALIZES and LATE:
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
        x, y = normalize_qk(
            x, y, q_gain_ptr, k_gain_ptr, q_bias_ptr, k_bias_ptr, head, flat_first, flat_second, flat_d < half,
            epsilon, dtype, HEADS, KV_HEADS, SIZE, OWN_GAINS, CENTERED,
        )  # fmt: skip
    if TEMPERED > 0:
        q_x, q_y = tempered(x, y, position, dtype, TEMPERED, TEMPERATURE, TEMPERED_FROM)
        x, y = tl.where(is_query, q_x, x), tl.where(is_query, q_y, y)
    first = tl.where(is_value, first, x).to(dtype)
    second = tl.where(is_value, second, y).to(dtype)
    cached_type = keys_ptr.dtype.element_ty
    query = q_ptr + (token * HEADS + head) * SIZE
    tl.store(query + first_d, first, mask=is_query & is_pair)
    tl.store(query + second_d, second, mask=is_query & is_pair)
    is_key = ~is_query & ~is_value & is_pair
    key = keys_ptr + (slot * KV_HEADS + head - HEADS) * SIZE
    tl.store(key + first_d, first.to(cached_type), mask=is_key)
    tl.store(key + second_d, second.to(cached_type), mask=is_key)
    is_value = is_value & is_known
    value = values_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * SIZE
    tl.store(value + first_d, first.to(cached_type), mask=is_value)
    tl.store(value + second_d, second.to(cached_type), mask=is_value)


def rope(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    num_heads: int,
    heads: HeadParts,
    dtype: torch.dtype,
) -> Tensor:
    """The queries [T, H, D] of the projections [T, (H+2G)·D], or of their parts [S, T, (H+2G)·D], in this type.

    Keys and values are written to their slots of [P, K, G, D].
    """
    num_tokens, (kv_heads, size) = len(positions_T), keys.shape[2:]
    q = torch.empty((num_tokens, num_heads, size), dtype=dtype, device=keys.device)
    launch: Any = rope_and_cache
    launch[(num_tokens, triton.cdiv(num_heads + 2 * kv_heads, HEADS_EACH))](
        qkv, q, keys, values, positions_T, slots_T, *heads.tensors, heads.epsilon, num_tokens,
        HEADS=num_heads, KV_HEADS=kv_heads, SIZE=size, HALF_PADDED=triton.next_power_of_2(size // 2), EACH=HEADS_EACH,
        PARTS=qkv.shape[0] if qkv.dim() == 3 else 1, **heads.options(size),
        **overlap_options(num_tokens), num_warps=4,
    )  # fmt: skip
    return q
