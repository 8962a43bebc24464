"""Sampling in Triton, so that it is part of a captured step: the same tokens as `sampling.sampler.Sampler`.

Many programs find the best of each of up to LANES groups of tokens, with noise where no threshold applies: the best of
these is the greedy token, or the one that is drawn. For top-k, one program of a row finds a score that at least k
groups reach, and keeps the few tokens above it, which are in those groups. Top-k, top-p and min-p are then exact
thresholds on those. Where too many tokens are left, without top-k, and for min-p alone, several programs search the
thresholds in the whole row together.

Shares for top-p are summed as integers: the result depends on no order.

Shapes: T rows · V vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import overlap_options, wait_for_previous
from flambeau.llm.backends.cuda.mask_kernel import TokenMasks
from flambeau.llm.backends.cuda.sampling_functions import (
    LOWEST_KEY,
    NONE,
    POSITION_STEP,
    best_of,
    gumbel,
    num_reached,
    ordered_keys,
    scores_of,
    shares_of,
)
from flambeau.llm.backends.cuda.sampling_search import SLOTS, num_parts, search_tokens_kernel
from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling.grammar_masks import Bits
from flambeau.llm.sampling.row_groups import RowSettings
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams

BLOCK = 4096  # tokens that a program reads at a time
LANES = 4096  # groups of tokens at most
CANDIDATES = 4096  # tokens that one program ranks at most
FEW = 512  # candidates that are ranked faster
TOP_P_CANDIDATES = 1536  # about so many are ranked for top-p without top-k
MANY_PARTS = 16  # of a row: so many programs search it as fast as one ranks candidates
NUM_WARPS = 16
GROUP_WARPS = 8
SEARCH_WARPS = 8
SEARCH_BLOCK = 2048  # tokens that a program of a search reads at a time
MAX_PACKED = tl.constexpr(1023)  # three counts up to this fit into 32 bits


@triton.jit  # type: ignore[untyped-decorator]
def kth_largest(keys, k, SIZE: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest key that at least k of the keys [SIZE] reach, or a smaller one that has the same first bits.

    Counts are of 32 bits: their sums in a warp are one instruction.
    """
    found = tl.full([], LOWEST_KEY, tl.int32)
    for i in tl.range(0, BITS, 2):
        step = tl.full([], 1, tl.int32) << (30 - i)
        one = (keys >= found + step).to(tl.int32)
        two = (keys >= found + step + step).to(tl.int32)
        three = (keys >= found + step + step + step).to(tl.int32)
        if SIZE <= MAX_PACKED:
            counts = tl.sum(one + (two << 10) + (three << 20), 0)
            first, second, third = counts & 1023, (counts >> 10) & 1023, counts >> 20
        else:
            counts = tl.sum(one + (two << 16), 0)
            first, second, third = counts & 0xFFFF, counts >> 16, tl.sum(three, 0)
        found += step * ((first >= k).to(tl.int32) + (second >= k).to(tl.int32) + (third >= k).to(tl.int32))
    return found


@triton.jit
def nucleus_key(keys, shares, limit):  # type: ignore[no-untyped-def]
    """The smallest key such that the shares of larger ones sum to less than the limit."""
    found = tl.full([], LOWEST_KEY, tl.int64)
    for i in tl.range(0, 32, 2):
        step = tl.full([], 1, tl.int64) << (30 - i)
        one = tl.sum(tl.where(keys >= (found + step).to(tl.int32), shares, 0), 0)
        two = tl.sum(tl.where(keys >= (found + step + step).to(tl.int32), shares, 0), 0)
        three = tl.sum(tl.where(keys >= (found + step + step + step).to(tl.int32), shares, 0), 0)
        found += step * num_reached(one.to(tl.float64), two.to(tl.float64), three.to(tl.float64), limit)
    return found.to(tl.int32)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def group_maxima_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, positions_ptr, keys_ptr, numbers_ptr, maxima_ptr,
    T, V: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The best of each group of tokens in a part of a row, with noise where all tokens may be drawn; NaN if one is."""
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(logits_ptr + row * V + token, mask=token < V, other=float("-inf"))
    if draws_from_all(numbers_ptr + row, T, V):
        start_word = tl.load(keys_ptr + row) + (tl.load(positions_ptr + row) + 1) * POSITION_STEP
        values = tl.div_rn(values, tl.load(numbers_ptr + row)) + gumbel(start_word, token)
    has_nan = tl.max((values != values).to(tl.int32), 1)
    maxima = tl.max(tl.where(values == values, values, float("-inf")), 1)
    maxima = tl.where(has_nan > 0, float("nan"), maxima)
    tl.store(maxima_ptr + row * NUM_GROUPS + group, maxima, mask=group < NUM_GROUPS)


@triton.jit
def draws_from_all(numbers_ptr, T, V):  # type: ignore[no-untyped-def]
    """Whether a row is sampled from all tokens: without top-k, top-p and min-p."""
    temperature, top_k = tl.load(numbers_ptr), tl.load(numbers_ptr + T).to(tl.int32)
    top_p, log_min_p = tl.load(numbers_ptr + 2 * T), tl.load(numbers_ptr + 3 * T)
    return (temperature > 0.0) & (top_k >= V) & (top_p >= 1.0) & (log_min_p == float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def row_shares(logits_ptr, temperature, best, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the shares of all tokens."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
        sums += shares_of(tl.div_rn(logits, temperature), best)
    return tl.sum(sums, 0)


@triton.jit  # type: ignore[untyped-decorator]
def draw_candidate(  # type: ignore[no-untyped-def]
    logits_ptr, scores_ptr, tokens_ptr, num_candidates, start_word, temperature, best, lowest, top_k, top_p,
    V: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The noisy score and the token that is drawn from up to SIZE candidates, the best ones of the row.

    The third number is 0 if more candidates are needed for top-p.
    """
    candidate = tl.arange(0, SIZE)
    is_candidate = candidate < num_candidates
    scores = tl.load(scores_ptr + candidate, mask=is_candidate, other=float("-inf"))
    tokens = tl.load(tokens_ptr + candidate, mask=is_candidate, other=V)
    noise = gumbel(start_word, tokens)
    keys = ordered_keys(scores)
    ranked = tl.full([], float("-inf"), tl.float32)
    is_enough = tl.full([], 1, tl.int32)
    if top_k < V:
        ranked = scores_of(kth_largest(keys, top_k, SIZE, 32))
    if top_p < 1.0:
        shares = tl.where(scores >= ranked, shares_of(scores, best), 0)
        few = tl.sum(shares, 0)
        whole = few
        if top_k >= V:
            whole = row_shares(logits_ptr, temperature, best, V, BLOCK)
        limit = whole.to(tl.float64) * top_p.to(tl.float64)
        is_enough = (few.to(tl.float64) >= limit).to(tl.int32)
        ranked = tl.maximum(ranked, scores_of(nucleus_key(keys, shares, limit)))
    noisy = tl.where(scores >= tl.maximum(lowest, ranked), scores + noise, float("-inf"))
    value, chosen = best_of(noisy, tokens, V)
    return value, chosen, is_enough


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def choose_tokens_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, maxima_ptr, positions_ptr, keys_ptr, numbers_ptr, groups_ptr, scores_ptr, tokens_ptr,
    bests_ptr, totals_ptr, chosen_ptr, next_ptr, T, V: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, FEW: tl.constexpr,
    TOP_P_CANDIDATES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The token of one row, from the best of its groups; or its best score in `bests_ptr`, if it must be searched.

    `groups_ptr`, `scores_ptr` and `tokens_ptr` have room for its candidates.
    """
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    groups_ptr += row * NUM_GROUPS
    scores_ptr += row * CANDIDATES
    tokens_ptr += row * CANDIDATES
    numbers_ptr += row
    temperature = tl.load(numbers_ptr)
    top_k = tl.load(numbers_ptr + T).to(tl.int32)
    top_p = tl.load(numbers_ptr + 2 * T)
    log_min_p = tl.load(numbers_ptr + 3 * T)
    start_word = tl.load(keys_ptr + row) + (tl.load(positions_ptr + row) + 1) * POSITION_STEP
    lane = tl.arange(0, LANES)
    maxima = tl.load(maxima_ptr + row * NUM_GROUPS + lane, mask=lane < NUM_GROUPS, other=float("-inf"))
    has_nan = tl.max((maxima != maxima).to(tl.int32), 0)
    maxima = tl.where(maxima == maxima, maxima, float("-inf"))
    value = tl.max(maxima, 0)
    is_finite = (tl.abs(value) < float("inf")) & (has_nan == 0)
    is_free = draws_from_all(numbers_ptr, T, V)
    chosen = tl.full([], 0, tl.int32)
    is_searched = False
    if (temperature <= 0.0) | is_free:
        group = tl.min(tl.where(maxima == value, lane, LANES), 0)
        member = group * GROUP + tl.arange(0, GROUP)
        values = tl.load(logits_ptr + member, mask=member < V, other=float("-inf"))
        if is_free:
            values = tl.div_rn(values, temperature) + gumbel(start_word, member)
        _, chosen = best_of(values, member, V)
    elif is_finite:
        best = tl.div_rn(value, temperature)
        is_searched = True
        if (top_k < V) | ((top_p < 1.0) & (TOP_P_CANDIDATES > 0)):
            wanted = tl.where(top_k < V, top_k, TOP_P_CANDIDATES)
            bound = tl.div_rn(scores_of(kth_largest(ordered_keys(maxima), wanted, LANES, 16)), temperature)
            bound = tl.where(bound == bound, bound, float("-inf"))  # fewer groups than wanted
            is_in = ((tl.div_rn(maxima, temperature) >= bound) & (lane < NUM_GROUPS)).to(tl.int32)
            tl.store(groups_ptr + tl.cumsum(is_in, 0) - 1, lane, mask=is_in > 0)
            num_found = tl.sum(is_in, 0) * GROUP  # tokens of these groups
            tl.debug_barrier()
            num_candidates = tl.full([], 0, tl.int32)
            for start in tl.range(0, num_found, BLOCK):
                found = start + tl.arange(0, BLOCK)
                token = tl.load(groups_ptr + found // GROUP, mask=found < num_found, other=V) * GROUP + found % GROUP
                is_token = (found < num_found) & (token < V)
                scores = tl.div_rn(tl.load(logits_ptr + token, mask=is_token, other=float("-inf")), temperature)
                is_in = (is_token & (scores >= bound)).to(tl.int32)
                place = num_candidates + tl.cumsum(is_in, 0) - 1
                tl.store(scores_ptr + place, scores, mask=(is_in > 0) & (place < CANDIDATES))
                tl.store(tokens_ptr + place, token, mask=(is_in > 0) & (place < CANDIDATES))
                num_candidates += tl.sum(is_in, 0)
            tl.debug_barrier()
            lowest = best + log_min_p
            is_enough = tl.full([], 0, tl.int32)
            if num_candidates <= FEW:
                value, chosen, is_enough = draw_candidate(
                    logits_ptr, scores_ptr, tokens_ptr, num_candidates, start_word, temperature, best, lowest, top_k,
                    top_p, V, FEW, BLOCK,
                )  # fmt: skip
            elif num_candidates <= CANDIDATES:
                value, chosen, is_enough = draw_candidate(
                    logits_ptr, scores_ptr, tokens_ptr, num_candidates, start_word, temperature, best, lowest, top_k,
                    top_p, V, CANDIDATES, BLOCK,
                )  # fmt: skip
            is_searched = is_enough == 0
        if is_searched:
            slot = tl.arange(0, SLOTS)
            tl.store(totals_ptr + row * SLOTS + slot, tl.zeros([SLOTS], tl.int64))
            tl.store(bests_ptr + row, best)
        is_finite = tl.abs(value) < float("inf")
    if not is_searched:
        tl.store(bests_ptr + row, float("nan"))
        tl.store(chosen_ptr + row, tl.where(is_finite, chosen, NONE).to(tl.int64))
        tl.store(next_ptr + row, tl.where(is_finite, chosen, 0).to(tl.int64))


def is_exact(vocab_size: int, device: torch.device) -> bool:
    """Whether the kernels choose the sampler's tokens on this device, from random logits."""
    settings = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_k=min(200, vocab_size)),
        SamplingParams(temperature=0.8, top_k=min(50, vocab_size), top_p=0.9),
        SamplingParams(temperature=1.0, top_p=0.8, min_p=0.01),
    )
    states = [SamplingState(params, i, [0], 1) for i, params in enumerate(settings)]
    logits_TV = torch.randn(len(states), vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
    expected_T = Sampler(vocab_size, device=device).sample(logits_TV.unsqueeze(1), states).view(-1)
    choice = TokenChoice(len(states), vocab_size, device)
    choice.set(RowSettings.of(states, vocab_size))
    choice.run(logits_TV, torch.zeros_like(choice.chosen_T), torch.zeros_like(choice.chosen_T))
    return choice.chosen_T.tolist() == expected_T.tolist()


class TokenChoice:
    """Chooses the tokens of a captured step; keeps its settings, masks and results at fixed addresses."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._numbers = torch.zeros(len(RowSettings.NUMBERS), num_rows, device=device)
        self._masked_numbers = torch.zeros_like(self._numbers)  # those of the choice after the masks
        self._masks = TokenMasks(num_rows, vocab_size, device)
        self._keys_T = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._group = triton.next_power_of_2(triton.cdiv(vocab_size, LANES))  # tokens
        self._num_groups = triton.cdiv(vocab_size, self._group)
        self._block = max(self._group, min(BLOCK, triton.next_power_of_2(vocab_size)))
        self._maxima = torch.empty(num_rows, self._num_groups, device=device)
        self._groups = torch.empty(num_rows, self._num_groups, dtype=torch.int32, device=device)
        self._scores = torch.empty(num_rows, CANDIDATES, device=device)
        self._tokens = torch.empty(num_rows, CANDIDATES, dtype=torch.int32, device=device)
        self._bests_T = torch.zeros(num_rows, device=device)  # of rows that are searched; NaN: the others
        self._totals = torch.zeros(num_rows, SLOTS.value, dtype=torch.int64, device=device)
        self._parts = num_parts(num_rows, device)
        self._top_p_candidates = TOP_P_CANDIDATES if self._parts < MANY_PARTS else 0  # 0: rows are searched at once
        self._part_values = torch.empty(num_rows, self._parts, device=device)
        self._part_tokens = torch.empty(num_rows, self._parts, dtype=torch.int32, device=device)
        self.chosen_T = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def set(self, settings: RowSettings | None) -> None:
        """Use these settings for the first rows from the next run on; the other rows take the best token.

        Those of constrained rows are for `run_masked`; `run` takes the best tokens then, which is the fastest.
        """
        if settings is None or settings.is_constrained:
            self._numbers.zero_()
        if settings is None:
            return
        num_rows = len(settings.keys_S)
        numbers = torch.zeros(self._numbers.shape, pin_memory=self._numbers.is_cuda)
        numbers[:, :num_rows] = torch.from_numpy(settings.numbers)
        keys_T = torch.zeros(self._keys_T.shape, dtype=torch.int64, pin_memory=self._numbers.is_cuda)
        keys_T[:num_rows] = torch.from_numpy(settings.keys_S)
        used = self._masked_numbers if settings.is_constrained else self._numbers
        used.copy_(numbers, non_blocking=True)  # pinned memory is not reused before the copy is done
        self._keys_T.copy_(keys_T, non_blocking=True)

    def run(self, logits_TV: Tensor, positions_T: Tensor, next_T: Tensor) -> None:
        """Tokens, or NO_TOKEN, into `chosen_T`; into `next_T` those that the next step can compute."""
        self._choose(logits_TV, positions_T, next_T, self._numbers)

    def set_masks(self, bits_SB: Bits) -> None:
        """Use these masks for the first rows in the next masked run."""
        self._masks.set(bits_SB)

    def run_masked(self, logits_TV: Tensor, positions_T: Tensor, next_T: Tensor) -> None:
        """As `run`, from the tokens that the masks allow; the logits of all others may be overwritten."""
        logits_TV = logits_TV.contiguous()
        self._masks.apply(logits_TV)
        self._choose(logits_TV, positions_T, next_T, self._masked_numbers)

    def _choose(self, logits_TV: Tensor, positions_T: Tensor, next_T: Tensor, numbers: Tensor) -> None:
        logits_TV = logits_TV.contiguous()  # the kernels know no strides, and a compiler may pad rows
        num_rows, vocab_size = logits_TV.shape
        overlaps = overlap_options(num_rows, num_rows)
        num_blocks = triton.cdiv(self._num_groups * self._group, self._block)
        group_maxima_kernel[(num_rows, num_blocks)](
            logits_TV, positions_T, self._keys_T, numbers, self._maxima, num_rows,
            V=vocab_size, GROUP=self._group, NUM_GROUPS=self._num_groups, BLOCK=self._block,
            **overlaps, num_warps=GROUP_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        choose_tokens_kernel[(num_rows,)](
            logits_TV, self._maxima, positions_T, self._keys_T, numbers, self._groups, self._scores,
            self._tokens, self._bests_T, self._totals, self.chosen_T, next_T, num_rows,
            V=vocab_size, GROUP=self._group, NUM_GROUPS=self._num_groups,
            LANES=triton.next_power_of_2(self._num_groups), BLOCK=self._block, CANDIDATES=CANDIDATES,
            FEW=min(FEW, CANDIDATES), TOP_P_CANDIDATES=self._top_p_candidates,
            **overlaps, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        search_tokens_kernel[(self._parts, num_rows)](
            logits_TV, positions_T, self._keys_T, numbers, self._bests_T, self._totals, self._part_values,
            self._part_tokens, self.chosen_T, next_T, num_rows,
            V=vocab_size, PARTS=self._parts, BLOCK=min(SEARCH_BLOCK, triton.next_power_of_2(vocab_size)),
            **overlaps, num_warps=SEARCH_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
