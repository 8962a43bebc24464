"""Sampling in Triton, so that it is part of a captured step: the same tokens as `sampling.sampler.Sampler`.

Many programs find the best of each of up to LANES groups of tokens, with noise where no threshold applies: the best of
these is the greedy token, or the one that is drawn. For other settings one program handles a row. It finds a score that
at least k groups reach, and keeps the few tokens above it, which are in those groups. Top-k, top-p and min-p are then
exact thresholds on those. Where too many tokens are left the thresholds are searched in the whole row, which takes
several times as long.

Shares for top-p are summed as integers: the result depends on no order.

Shapes: T rows · V vocabulary
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.mask_kernel import TokenMasks
from flambeau.llm.core.outputs import NO_TOKEN
from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling import rng
from flambeau.llm.sampling.grammar_masks import Bits
from flambeau.llm.sampling.row_groups import RowSettings
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.sampling_params import SamplingParams

BLOCK = 4096  # tokens that a program reads at a time
LANES = 4096  # groups of tokens at most
CANDIDATES = 4096  # tokens that are ranked at most without reading the whole row again
TOP_P_CANDIDATES = 1536  # about so many are ranked for top-p without top-k
NUM_WARPS = 16
GROUP_WARPS = 8
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

POSITION_STEP = tl.constexpr(rng.POSITION_STEP)
TOKEN_STEP = tl.constexpr(rng.TOKEN_STEP)
FIRST_FACTOR = tl.constexpr(rng.FIRST_FACTOR)
SECOND_FACTOR = tl.constexpr(rng.SECOND_FACTOR)
POSITIVE = tl.constexpr(rng.POSITIVE)
TO_UNIT = tl.constexpr(rng.TO_UNIT)
SMALLEST = tl.constexpr(rng.SMALLEST)
NONE = tl.constexpr(NO_TOKEN)
ONE_SHARE = tl.constexpr(2.0**40)  # the share of the best token; 2**18 of them fit into 64 bits
LOWEST_KEY = tl.constexpr(-(2**31))
COUNT_BITS = tl.constexpr(20)  # of each of three counts in one number
TWO_COUNTS = tl.constexpr(40)
COUNT_MASK = tl.constexpr(2**20 - 1)

if IS_INTERPRETED:

    @triton.jit
    def log1p(x):  # type: ignore[no-untyped-def]
        """The interpreter has no library of device functions."""
        whole = 1.0 + x
        return tl.where(whole == 1.0, x, tl.log(whole) * (x / tl.where(whole == 1.0, 1.0, whole - 1.0)))

else:
    from triton.language.extra.cuda import libdevice

    log1p = libdevice.log1p  # as torch's own: the last digit decides between tokens that are equally likely


@triton.jit
def ordered_keys(scores):  # type: ignore[no-untyped-def]
    """Integers in the order of the scores."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def scores_of(keys):  # type: ignore[no-untyped-def]
    bits = keys ^ ((keys >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def kth_largest(keys, k, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest key that at least k of the keys reach, or a smaller one that has the same first bits."""
    found = tl.full([], LOWEST_KEY, tl.int32)
    for i in tl.range(0, BITS, 2):
        step = tl.full([], 1, tl.int32) << (30 - i)
        # Three counts in one sum.
        reached = (keys >= found + step).to(tl.int64)
        reached += (keys >= found + step + step).to(tl.int64) << COUNT_BITS
        reached += (keys >= found + step + step + step).to(tl.int64) << TWO_COUNTS
        counts = tl.sum(reached, 0)
        found += step * ((counts & COUNT_MASK) >= k).to(tl.int32)
        found += step * (((counts >> COUNT_BITS) & COUNT_MASK) >= k).to(tl.int32)
        found += step * ((counts >> TWO_COUNTS) >= k).to(tl.int32)
    return found


@triton.jit
def nucleus_key(keys, shares, limit):  # type: ignore[no-untyped-def]
    """The smallest key such that the shares of larger ones sum to less than the limit."""
    found = tl.full([], LOWEST_KEY, tl.int64)
    for i in tl.range(0, 32):
        step = tl.full([], 1, tl.int64) << (31 - i)
        reached = tl.sum(tl.where(keys >= (found + step).to(tl.int32), shares, 0), 0)
        found += step * (reached.to(tl.float64) >= limit).to(tl.int64)
    return found.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def row_counts(logits_ptr, temperature, key, V: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens of the row reach a key."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
        keys = ordered_keys(tl.div_rn(logits, temperature))
        count += ((keys >= key) & (token < V)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit  # type: ignore[untyped-decorator]
def row_shares(  # type: ignore[no-untyped-def]
    logits_ptr, temperature, best, key, lowest, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sum of the shares of tokens of the row that reach a key and the lowest score."""
    sums = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, V, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
        scores = tl.div_rn(logits, temperature)
        is_in = (ordered_keys(scores) >= key) & (scores >= lowest)
        sums += tl.where(is_in, shares_of(scores, best), 0)
    return tl.sum(sums, 0)


@triton.jit
def shares_of(scores, best):  # type: ignore[no-untyped-def]
    return (tl.exp(scores - best) * ONE_SHARE).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def row_threshold(  # type: ignore[no-untyped-def]
    logits_ptr, temperature, best, top_k, top_p, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The smallest score that passes top-k and top-p, from the whole row."""
    lowest = tl.full([], float("-inf"), tl.float32)
    if top_k < V:
        found = tl.full([], LOWEST_KEY, tl.int64)
        for i in tl.range(0, 32):
            step = tl.full([], 1, tl.int64) << (31 - i)
            count = row_counts(logits_ptr, temperature, found + step, V, BLOCK)
            found += step * (count >= top_k).to(tl.int64)
        lowest = scores_of(found.to(tl.int32))
    if top_p < 1.0:
        found = tl.full([], LOWEST_KEY, tl.int64)
        whole = row_shares(logits_ptr, temperature, best, found, lowest, V, BLOCK)
        limit = whole.to(tl.float64) * top_p.to(tl.float64)
        for i in tl.range(0, 32):
            step = tl.full([], 1, tl.int64) << (31 - i)
            above = row_shares(logits_ptr, temperature, best, found + step, lowest, V, BLOCK)
            found += step * (above.to(tl.float64) >= limit).to(tl.int64)
        lowest = tl.maximum(lowest, scores_of(found.to(tl.int32)))
    return lowest


@triton.jit
def gumbel(start, tokens):  # type: ignore[no-untyped-def]
    """As `rng.gumbel`: the same numbers."""
    words = tokens.to(tl.int64) * TOKEN_STEP + start
    words = (words ^ (words >> 30)) * FIRST_FACTOR
    words = (words ^ (words >> 27)) * SECOND_FACTOR
    negative = (words & POSITIVE).to(tl.float32) * -TO_UNIT - SMALLEST
    return -tl.log(-log1p(negative))


@triton.jit  # type: ignore[untyped-decorator]
def best_of(values, tokens, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest value, and the first of the tokens that have it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, tokens, V), 0)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def group_maxima_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, positions_ptr, keys_ptr, numbers_ptr, maxima_ptr,
    T, V: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of each group of tokens in a part of a row, with noise where all tokens may be drawn; NaN if one is."""
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


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def choose_tokens_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, maxima_ptr, positions_ptr, keys_ptr, numbers_ptr, counts_ptr, groups_ptr, scores_ptr, tokens_ptr,
    chosen_ptr, next_ptr, T, V: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, LANES: tl.constexpr,
    BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, TOP_P_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The token of one row, from the best of its groups.

    `counts_ptr`, `groups_ptr`, `scores_ptr` and `tokens_ptr` have room for its candidates, in any order.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * V
    counts_ptr += row * 2
    groups_ptr += row * NUM_GROUPS
    scores_ptr += row * CANDIDATES
    tokens_ptr += row * CANDIDATES
    numbers_ptr += row
    temperature = tl.load(numbers_ptr)
    start_word = tl.load(keys_ptr + row) + (tl.load(positions_ptr + row) + 1) * POSITION_STEP
    lane = tl.arange(0, LANES)
    maxima = tl.load(maxima_ptr + row * NUM_GROUPS + lane, mask=lane < NUM_GROUPS, other=float("-inf"))
    has_nan = tl.max((maxima != maxima).to(tl.int32), 0)
    maxima = tl.where(maxima == maxima, maxima, float("-inf"))
    value, group = best_of(maxima, lane, LANES)
    member = group * GROUP + tl.arange(0, GROUP)
    values = tl.load(logits_ptr + member, mask=member < V, other=float("-inf"))
    is_free = draws_from_all(numbers_ptr, T, V)
    if is_free:
        values = tl.div_rn(values, temperature) + gumbel(start_word, member)
    _, chosen = best_of(values, member, V)
    if (temperature > 0.0) & (is_free == 0):
        top_k = tl.load(numbers_ptr + T).to(tl.int32)
        top_p = tl.load(numbers_ptr + 2 * T)
        best = tl.div_rn(value, temperature)
        lowest = best + tl.load(numbers_ptr + 3 * T)
        has_top_k = top_k < V
        is_ranked = has_top_k | (top_p < 1.0)
        is_few = temperature <= 0.0
        if is_ranked:
            wanted = tl.where(has_top_k, top_k, TOP_P_CANDIDATES)
            bound = tl.div_rn(scores_of(kth_largest(ordered_keys(maxima), wanted, 16)), temperature)
            bound = tl.where(bound == bound, bound, float("-inf"))  # fewer groups than wanted
            tl.store(counts_ptr, 0)
            tl.store(counts_ptr + 1, 0)
            tl.debug_barrier()
            is_in = (tl.div_rn(maxima, temperature) >= bound) & (lane < NUM_GROUPS)
            place = tl.atomic_add(counts_ptr + tl.zeros([LANES], tl.int32), 1, mask=is_in, sem="relaxed")
            tl.store(groups_ptr + place, lane, mask=is_in)
            num_found = tl.sum(is_in.to(tl.int32), 0) * GROUP  # tokens of these groups
            tl.debug_barrier()
            counts = tl.zeros([BLOCK], tl.int32)
            for start in tl.range(0, num_found, BLOCK):
                found = start + tl.arange(0, BLOCK)
                is_found = found < num_found
                token = tl.load(groups_ptr + found // GROUP, mask=is_found, other=V) * GROUP + found % GROUP
                is_found = is_found & (token < V)
                scores = tl.div_rn(tl.load(logits_ptr + token, mask=is_found, other=float("-inf")), temperature)
                is_in = is_found & (scores >= bound)
                place = tl.atomic_add(counts_ptr + 1 + tl.zeros([BLOCK], tl.int32), 1, mask=is_in, sem="relaxed")
                tl.store(scores_ptr + place, scores, mask=is_in & (place < CANDIDATES))
                tl.store(tokens_ptr + place, token, mask=is_in & (place < CANDIDATES))
                counts += is_in.to(tl.int32)
            tl.debug_barrier()
            num_candidates = tl.sum(counts, 0)
            is_few = num_candidates <= CANDIDATES
            if is_few:
                candidate = tl.arange(0, CANDIDATES)
                is_candidate = candidate < num_candidates
                few_scores = tl.load(scores_ptr + candidate, mask=is_candidate, other=float("-inf"))
                few_tokens = tl.load(tokens_ptr + candidate, mask=is_candidate, other=V)
                keys = ordered_keys(few_scores)
                ranked = tl.full([], float("-inf"), tl.float32)
                if has_top_k:
                    ranked = scores_of(kth_largest(keys, top_k, 32))
                if top_p < 1.0:
                    few_shares = tl.where(few_scores >= ranked, shares_of(few_scores, best), 0)
                    few_sum = tl.sum(few_shares, 0)
                    whole = few_sum
                    if not has_top_k:
                        whole = row_shares(logits_ptr, temperature, best, LOWEST_KEY, float("-inf"), V, BLOCK)
                    limit = whole.to(tl.float64) * top_p.to(tl.float64)
                    is_few = few_sum.to(tl.float64) >= limit
                    ranked = tl.maximum(ranked, scores_of(nucleus_key(keys, few_shares, limit)))
                noisy = few_scores + gumbel(start_word, few_tokens)
                noisy = tl.where(few_scores >= tl.maximum(lowest, ranked), noisy, float("-inf"))
                value, chosen = best_of(noisy, few_tokens, V)
        if not is_few:
            if is_ranked:
                lowest = tl.maximum(lowest, row_threshold(logits_ptr, temperature, best, top_k, top_p, V, BLOCK))
            lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
            lane_token = tl.full([BLOCK], V, tl.int32)
            for start in tl.range(0, V, BLOCK):
                token = start + tl.arange(0, BLOCK)
                logits = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
                scores = tl.div_rn(logits, temperature)
                noisy = tl.where(scores >= lowest, scores + gumbel(start_word, token), float("-inf"))
                is_better = noisy > lane_best
                lane_best = tl.where(is_better, noisy, lane_best)
                lane_token = tl.where(is_better, token, lane_token)
            value, chosen = best_of(lane_best, lane_token, V)
    is_finite = (tl.abs(value) < float("inf")) & (has_nan == 0)
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
        self._counts = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
        self._scores = torch.empty(num_rows, CANDIDATES, device=device)
        self._tokens = torch.empty(num_rows, CANDIDATES, dtype=torch.int32, device=device)
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
        num_parts = triton.cdiv(self._num_groups * self._group, self._block)
        group_maxima_kernel[(num_rows, num_parts)](
            logits_TV, positions_T, self._keys_T, numbers, self._maxima, num_rows,
            V=vocab_size, GROUP=self._group, NUM_GROUPS=self._num_groups, BLOCK=self._block,
            num_warps=GROUP_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        choose_tokens_kernel[(num_rows,)](
            logits_TV, self._maxima, positions_T, self._keys_T, numbers, self._counts, self._groups, self._scores,
            self._tokens, self.chosen_T, next_T, num_rows,
            V=vocab_size, GROUP=self._group, NUM_GROUPS=self._num_groups,
            LANES=triton.next_power_of_2(self._num_groups), BLOCK=self._block, CANDIDATES=CANDIDATES,
            TOP_P_CANDIDATES=TOP_P_CANDIDATES, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
