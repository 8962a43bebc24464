"""Attention over latents (MLA) in Triton: all heads share one key of a token; the plain version is LatentAttention.

A program has some heads of some tokens. Of a key, the latent is also the value. Queries come with the weights that make
keys already applied, except for their rotated part, which the kernel rotates.

Shapes: T tokens of the step · H heads · R latent · P rotated part of a head · N the rest of it · V value of a head ·
B blocks of the longest sequence · K tokens of a block · M tiles · S parts of a sum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.attention import compute_type_of, merge_splits, num_splits
from flambeau.llm.backends.cuda.latent_one_row import has_kernels, latent_queries, values_of_splits
from flambeau.llm.backends.cuda.launch import overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.norm import normalize
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.models.latent_attention import LatentAttention

# Rows of a program (its tokens times its heads), places that it reads at a time, warps and pipeline stages, for decode
# steps (the best of those measured with 16 heads and 200 tokens) and for prompts; in float32 half as many places.
FEW_SHAPE = 16, 32, 4, 2
SHAPE = 64, 32, 8, 2


@triton.jit  # type: ignore[untyped-decorator]
def pair_places(d, P: tl.constexpr, PAIRED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the first and the second number of the pairs d of a rotation are."""
    if PAIRED:
        first, second = 2 * d, 2 * d + 1
    else:
        first, second = d, d + P // 2
    return first, second


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def cache_latents(  # type: ignore[no-untyped-def]
    kv_ptr, keys_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, gain_ptr, like_ptr, epsilon, T,
    R: tl.constexpr, PADDED: tl.constexpr, P: tl.constexpr, HALF_PADDED: tl.constexpr, PAIRED: tl.constexpr,
    PARTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The latent of a token, normalized, and its rotated key, in the type of `like_ptr`, to their slot."""
    token = tl.program_id(0).to(tl.int64)
    dtype = like_ptr.dtype.element_ty
    cached_type = keys_ptr.dtype.element_ty
    r, d = tl.arange(0, PADDED), tl.arange(0, HALF_PADDED)
    is_latent, is_pair = r < R, d < P // 2
    first_d, second_d = pair_places(d, P, PAIRED)
    gain = tl.load(gain_ptr + r, mask=is_latent, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    cos = tl.load(cos_ptr + position * (P // 2) + d, mask=is_pair, other=0.0)
    sin = tl.load(sin_ptr + position * (P // 2) + d, mask=is_pair, other=0.0)
    wait_for_previous(OVERLAPS)
    latent = tl.zeros([PADDED], tl.float32)
    first = tl.zeros([HALF_PADDED], tl.float32)
    second = tl.zeros([HALF_PADDED], tl.float32)
    for part in tl.static_range(PARTS):
        at = kv_ptr + (part * T + token) * (R + P)
        latent += tl.load(at + r, mask=is_latent, other=0.0).to(tl.float32)
        first += tl.load(at + R + first_d, mask=is_pair, other=0.0).to(tl.float32)
        second += tl.load(at + R + second_d, mask=is_pair, other=0.0).to(tl.float32)
    latent = latent.to(dtype).to(tl.float32)
    first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    latent = latent * tl.rsqrt(tl.sum(latent * latent, 0) / R + epsilon) * gain
    key = keys_ptr + slot * (R + P)
    tl.store(key + r, latent.to(dtype).to(cached_type), mask=is_latent)
    tl.store(key + R + d, (first * cos - second * sin).to(dtype).to(cached_type), mask=is_pair)
    tl.store(key + R + P // 2 + d, (second * cos + first * sin).to(dtype).to(cached_type), mask=is_pair)


@triton.jit(do_not_specialize=["T", "table_stride"])  # type: ignore[untyped-decorator]
def attend_latents(  # type: ignore[no-untyped-def]
    q_latent_ptr, q_ptr, keys_ptr, cos_ptr, sin_ptr, tables_ptr, positions_ptr, tiles_ptr,
    out_ptr, sums_ptr, highs_ptr, totals_ptr, scale, T, table_stride,
    HEADS: tl.constexpr, HEADS_EACH: tl.constexpr, QUERY_LEN: tl.constexpr, R: tl.constexpr, PADDED: tl.constexpr,
    P: tl.constexpr, HALF_PADDED: tl.constexpr, N: tl.constexpr, PAIRED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One split of the places of some tokens of a sequence, for some heads.

    Sequences have QUERY_LEN tokens; 0: tiles [M, 3] are a sequence, its first token and the end of its tokens.
    """
    tile, head_block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens_each: tl.constexpr = ROWS // HEADS_EACH
    row = tl.arange(0, ROWS)
    if QUERY_LEN > 0:
        tiles_each: tl.constexpr = (QUERY_LEN + tokens_each - 1) // tokens_each
        sequence = tile // tiles_each
        first_token = sequence * QUERY_LEN + tile % tiles_each * tokens_each
        end_token = sequence * QUERY_LEN + QUERY_LEN
    else:
        sequence = tl.load(tiles_ptr + 3 * tile).to(tl.int32)
        first_token = tl.load(tiles_ptr + 3 * tile + 1).to(tl.int32)
        end_token = tl.load(tiles_ptr + 3 * tile + 2).to(tl.int32)
    token = first_token + row // HEADS_EACH
    head = head_block * HEADS_EACH + row % HEADS_EACH
    is_row = (token < end_token) & (head < HEADS)
    r, d = tl.arange(0, PADDED), tl.arange(0, HALF_PADDED)
    is_latent, is_pair = r < R, d < P // 2
    first_d, second_d = pair_places(d, P, PAIRED)
    dtype = out_ptr.dtype.element_ty
    compute_type = compute_type_of(keys_ptr.dtype.element_ty, dtype)
    position = tl.load(positions_ptr + token, mask=is_row, other=-1).to(tl.int32)
    end = tl.max(position) + 1
    share = tl.cdiv(tl.cdiv(end, SPLITS), PLACES) * PLACES
    begin = split * share
    stop = tl.minimum(begin + share, end)
    is_rotated = is_row[:, None] & is_pair[None, :]
    angle = tl.maximum(position, 0)[:, None] * (P // 2) + d[None, :]
    cos = tl.load(cos_ptr + angle, mask=is_rotated, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=is_rotated, other=0.0)
    wait_for_previous(OVERLAPS)

    wide_token = token.to(tl.int64)
    latent_at = q_latent_ptr + (head * T + wide_token)[:, None] * R + r[None, :]
    q = tl.load(latent_at, mask=is_row[:, None] & is_latent[None, :], other=0.0).to(compute_type)
    q_at = q_ptr + ((wide_token * HEADS + head) * (N + P) + N)[:, None]
    first = tl.load(q_at + first_d[None, :], mask=is_rotated, other=0.0).to(tl.float32)
    second = tl.load(q_at + second_d[None, :], mask=is_rotated, other=0.0).to(tl.float32)
    q1 = (first * cos - second * sin).to(dtype).to(compute_type)
    q2 = (second * cos + first * sin).to(dtype).to(compute_type)
    high = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(begin, stop, PLACES):
        place = start + tl.arange(0, PLACES)
        is_place = place < stop
        block = tl.load(tables_ptr + sequence * table_stride + place // BLOCK_SIZE, mask=is_place, other=0)
        key = keys_ptr + (block * BLOCK_SIZE + place % BLOCK_SIZE)[:, None] * (R + P)
        k_mask = is_place[:, None] & is_pair[None, :]
        k = tl.load(key + r[None, :], mask=is_place[:, None] & is_latent[None, :], other=0.0).to(compute_type)
        k1 = tl.load(key + R + d[None, :], mask=k_mask, other=0.0).to(compute_type)
        k2 = tl.load(key + R + P // 2 + d[None, :], mask=k_mask, other=0.0).to(compute_type)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee") * scale
        is_seen = (position[:, None] >= place[None, :]) & is_place[None, :]
        scores = tl.where(is_seen, scores, -1.0e30)
        higher = tl.maximum(high, tl.max(scores, 1))
        weights = tl.where(is_seen, tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(high - higher)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(compute_type), k, input_precision="ieee")
        high = higher
    kept = (wide_token * HEADS + head) * SPLITS + split
    at = kept[:, None] * R + r[None, :]
    mask = is_row[:, None] & is_latent[None, :]
    if SPLITS == 1:
        y = sums / tl.maximum(total, 1.0)[:, None]  # the largest weight is 1; padding rows have a total of 0
        tl.store(out_ptr + at, y.to(dtype), mask=mask)
    else:
        tl.store(highs_ptr + kept, high, mask=is_row)
        tl.store(totals_ptr + kept, total, mask=is_row)
        tl.store(sums_ptr + at, sums, mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    """Attention of a layer over latents, with its tensors as the kernels read them."""

    attention: LatentAttention
    queries: tuple[KernelLinear, ...]  # the projection of queries, or those to their latents and from them
    tables: tuple[Tensor, Tensor]  # cosine and sine of positions
    keys: Tensor  # [blocks, K, 1, R + P]

    def __call__(
        self, x_TE: Tensor, kv: Tensor, inputs: StepInputs, tiles_M3: Tensor | None, first_q: Tensor | None = None
    ) -> Tensor:
        """The outputs [T, H·V] for normalized rows; `kv` [T, R+P], or parts, are their latents and rotated keys.

        Keys are written to their slots. `tiles_M3` are those of prompts; None: sequences have `query_len` tokens. With
        `first_q`, the outputs of the first projection of queries, the rows are not used.
        """
        attention, num_tokens = self.attention, len(x_TE)
        self._cache(kv, x_TE, inputs)
        q_THD = self._project(x_TE, first_q).view(num_tokens, attention.num_heads, -1)
        to_keys_HNR, to_values_HVR = attention.kv_b_proj.parts()
        if num_tokens == 1 and tiles_M3 is None and has_kernels(to_keys_HNR, to_values_HVR):
            q_HTR = latent_queries(q_THD[0], to_keys_HNR)
            found = self._attend(q_HTR, q_THD, inputs, None, merges=False)
            if not isinstance(found, Tensor):
                return values_of_splits(
                    found, inputs.positions_T, to_values_HVR, shape_for(FEW_SHAPE, q_THD.dtype)[1], x_TE.dtype
                )
            y_THR = found
        else:
            q_HTR = torch.bmm(q_THD[..., : attention.unrotated_size].transpose(0, 1), to_keys_HNR)
            y_THR = self._attend(q_HTR, q_THD, inputs, tiles_M3)
        return torch.bmm(y_THR.transpose(0, 1), to_values_HVR.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _cache(self, kv: Tensor, like_TE: Tensor, inputs: StepInputs) -> None:
        norm, num_tokens = self.attention.kv_a_layernorm, len(like_TE)
        launch: Any = cache_latents
        launch[(num_tokens,)](
            kv, self.keys, inputs.positions_T, inputs.slots_T, *self.tables, norm.weight, like_TE, norm.epsilon,
            num_tokens, **self._sizes, PARTS=kv.shape[0] if kv.dim() == 3 else 1,
            **overlap_options(num_tokens), num_warps=4,
        )  # fmt: skip

    @property
    def _sizes(self) -> dict[str, Any]:
        latent, rotary = self.attention.latent_size, self.attention.rotary_size
        return {
            "R": latent,
            "PADDED": max(16, triton.next_power_of_2(latent)),
            "P": rotary,
            "HALF_PADDED": max(16, triton.next_power_of_2(rotary // 2)),
            "PAIRED": self.attention.is_paired,
        }

    def _project(self, x_TE: Tensor, first_q: Tensor | None) -> Tensor:
        """The queries [T, H·(N+P)]."""
        first, *rest = self.queries
        q = whole(first(x_TE), x_TE.dtype) if first_q is None else first_q
        for second in rest:
            norm = self.attention.q_a_layernorm
            q = whole(second(normalize(q, norm.weight, norm.epsilon)), x_TE.dtype)
        return q

    def _attend(
        self, q_HTR: Tensor, q_THD: Tensor, inputs: StepInputs, tiles_M3: Tensor | None, *, merges: bool = True
    ) -> Any:
        """What the heads find [T, H, R]; or the sums, highest scores and totals of splits, if these are not merged."""
        num_tokens, heads, latent = len(q_THD), self.attention.num_heads, self.attention.latent_size
        tables_SB, query_len = inputs.block_tables_SB, inputs.query_len if tiles_M3 is None else 0
        rows, places, warps, stages = shape_for(SHAPE if tiles_M3 is not None else FEW_SHAPE, q_THD.dtype)
        heads_each = min(rows, triton.next_power_of_2(heads))
        num_blocks = triton.cdiv(heads, heads_each)
        num_tiles, splits = len(tables_SB) * triton.cdiv(query_len, rows // heads_each), 1
        if tiles_M3 is not None:
            num_tiles = len(tiles_M3)
        else:
            splits = num_splits(num_tiles, num_blocks)
        out = torch.empty((num_tokens, heads, latent), dtype=q_THD.dtype, device=q_THD.device)
        sums = highs = totals = None
        if splits > 1:
            sums = torch.empty((num_tokens, heads, splits, latent), dtype=torch.float32, device=out.device)
            highs, totals = torch.empty((2, num_tokens, heads, splits), dtype=torch.float32, device=out.device)
        launch: Any = attend_latents
        launch[(num_tiles, num_blocks, splits)](
            q_HTR, q_THD, self.keys, *self.tables, tables_SB, inputs.positions_T, tiles_M3, out, sums, highs, totals,
            self.attention.scale, num_tokens, tables_SB.stride(0),
            HEADS=heads, HEADS_EACH=heads_each, QUERY_LEN=query_len, **self._sizes, N=self.attention.unrotated_size,
            BLOCK_SIZE=self.keys.shape[1], SPLITS=splits, ROWS=rows, PLACES=places,
            **overlap_options(num_tokens), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        if splits > 1 and not merges:
            return sums, highs, totals
        if splits > 1:
            launch = merge_splits
            launch[(num_tokens * heads,)](
                sums, highs, totals, out, SIZE=latent, PADDED=self._sizes["PADDED"], SPLITS=splits,
                **overlap_options(num_tokens), num_warps=2,
            )  # fmt: skip
        return out


def shape_for(shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[int, int, int, int]:
    rows, places, warps, stages = shape
    return rows, places if dtype.itemsize == 2 else places // 2, warps, stages


def whole(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, N], or parts [S, T, N] of it, to [T, N] in this type."""
    return (sums.sum(0) if sums.dim() == 3 else sums).to(dtype)


def tile_size(num_heads: int) -> int:
    """The tokens of a prompt that a program has."""
    return int(SHAPE[0] // min(SHAPE[0], triton.next_power_of_2(num_heads)))
