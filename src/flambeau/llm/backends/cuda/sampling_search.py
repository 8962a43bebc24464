"""Sampling of a row by several programs, in Triton, where thresholds depend on many tokens.

Each program has a part of the row. They search the threshold of top-k or top-p two bits at a time: each adds its counts
or shares to a total and waits for the others.

Shapes: T rows · V vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from flambeau.llm.backends.cuda.launch import wait_for_previous
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

MAX_PARTS = 64  # of a row
COUNT_BITS = tl.constexpr(20)  # of each of three counts in one number of 64 bits
TWO_COUNTS = tl.constexpr(40)
COUNT_MASK = tl.constexpr(2**20 - 1)
# Numbers of a search, 64 bits each: the programs that have arrived, counts, shares.
COUNT_SLOTS = tl.constexpr(1)
WHOLE_SLOT = tl.constexpr(17)
SHARE_SLOTS = tl.constexpr(18)
SLOTS = tl.constexpr(128)


@triton.jit
def arrive(counter_ptr, target):  # type: ignore[no-untyped-def]
    """Wait until so many programs have arrived."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < target:
        arrived = tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def total_of(value, slot_ptr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add to a sum of all programs of a row."""
    if PARTS > 1:
        tl.atomic_add(slot_ptr, value, sem="relaxed", scope="gpu")


@triton.jit  # type: ignore[untyped-decorator]
def read_total(value, slot_ptr, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    total = value
    if PARTS > 1:
        total = tl.load(slot_ptr, volatile=True)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def part_counts(  # type: ignore[no-untyped-def]
    logits_ptr, begin, end, temperature, found, step, BLOCK: tl.constexpr
):  # fmt: skip
    """How many tokens reach the three keys after `found`, in one number."""
    counts = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < end, other=float("-inf"))
        keys = ordered_keys(tl.div_rn(logits, temperature)).to(tl.int64)
        is_token = (token < end).to(tl.int64)
        reached = (keys >= found + step).to(tl.int64)
        reached += (keys >= found + 2 * step).to(tl.int64) << COUNT_BITS
        reached += (keys >= found + 3 * step).to(tl.int64) << TWO_COUNTS
        counts += reached * is_token
    return tl.sum(counts, 0)


@triton.jit  # type: ignore[untyped-decorator]
def part_shares(  # type: ignore[no-untyped-def]
    logits_ptr, begin, end, temperature, best, found, step, lowest, BLOCK: tl.constexpr
):  # fmt: skip
    """The sums of the shares of tokens that reach the lowest score and one of the three keys after `found`."""
    ones = tl.zeros([BLOCK], tl.int64)
    twos = tl.zeros([BLOCK], tl.int64)
    threes = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < end, other=float("-inf"))
        scores = tl.div_rn(logits, temperature)
        keys = ordered_keys(scores).to(tl.int64)
        shares = tl.where((scores >= lowest) & (token < end), shares_of(scores, best), 0)
        ones += tl.where(keys >= found + step, shares, 0)
        twos += tl.where(keys >= found + 2 * step, shares, 0)
        threes += tl.where(keys >= found + 3 * step, shares, 0)
    return tl.sum(ones, 0), tl.sum(twos, 0), tl.sum(threes, 0)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def search_tokens_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, positions_ptr, keys_ptr, numbers_ptr, bests_ptr, totals_ptr, values_ptr, tokens_ptr,
    chosen_ptr, next_ptr, T, V: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The token of a row whose thresholds depend on many tokens; its programs have a part of it each.

    They wait for each other after each step of the search, so all programs must run at the same time.
    """
    wait_for_previous(OVERLAPS)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    best = tl.load(bests_ptr + row)
    if best == best:
        logits_ptr += row * V
        totals_ptr += row * SLOTS
        temperature = tl.load(numbers_ptr + row)
        top_k = tl.load(numbers_ptr + T + row).to(tl.int32)
        top_p = tl.load(numbers_ptr + 2 * T + row)
        lowest = best + tl.load(numbers_ptr + 3 * T + row)
        start_word = tl.load(keys_ptr + row) + (tl.load(positions_ptr + row) + 1) * POSITION_STEP
        each: tl.constexpr = (V + PARTS * BLOCK - 1) // (PARTS * BLOCK) * BLOCK
        begin = part * each
        end = tl.minimum(begin + each, V)
        ranked = tl.full([], float("-inf"), tl.float32)
        num_waits = tl.full([], 0, tl.int32)
        if top_k < V:
            found = tl.full([], LOWEST_KEY, tl.int64)
            for i in tl.range(0, 16):
                step = tl.full([], 1, tl.int64) << (30 - 2 * i)
                counts = part_counts(logits_ptr, begin, end, temperature, found, step, BLOCK)
                total_of(counts, totals_ptr + COUNT_SLOTS + i, PARTS)
                num_waits += 1
                if PARTS > 1:
                    arrive(totals_ptr, num_waits * PARTS)
                counts = read_total(counts, totals_ptr + COUNT_SLOTS + i, PARTS)
                found += step * ((counts & COUNT_MASK) >= top_k).to(tl.int64)
                found += step * (((counts >> COUNT_BITS) & COUNT_MASK) >= top_k).to(tl.int64)
                found += step * ((counts >> TWO_COUNTS) >= top_k).to(tl.int64)
            ranked = scores_of(found.to(tl.int32))
        if top_p < 1.0:
            found = tl.full([], LOWEST_KEY, tl.int64)
            zero = tl.full([], 0, tl.int64)
            whole, _, _ = part_shares(logits_ptr, begin, end, temperature, best, found, zero, ranked, BLOCK)
            total_of(whole, totals_ptr + WHOLE_SLOT, PARTS)
            limit = tl.full([], 0.0, tl.float64)
            for i in tl.range(0, 16):
                step = tl.full([], 1, tl.int64) << (30 - 2 * i)
                one, two, three = part_shares(logits_ptr, begin, end, temperature, best, found, step, ranked, BLOCK)
                slot_ptr = totals_ptr + SHARE_SLOTS + 3 * i
                total_of(one, slot_ptr, PARTS)
                total_of(two, slot_ptr + 1, PARTS)
                total_of(three, slot_ptr + 2, PARTS)
                num_waits += 1
                if PARTS > 1:
                    arrive(totals_ptr, num_waits * PARTS)
                limit = read_total(whole, totals_ptr + WHOLE_SLOT, PARTS).to(tl.float64) * top_p.to(tl.float64)
                one = read_total(one, slot_ptr, PARTS).to(tl.float64)
                two = read_total(two, slot_ptr + 1, PARTS).to(tl.float64)
                three = read_total(three, slot_ptr + 2, PARTS).to(tl.float64)
                found += step * num_reached(one, two, three, limit)
            ranked = tl.maximum(ranked, scores_of(found.to(tl.int32)))
        lowest = tl.maximum(lowest, ranked)
        lane_best = tl.full([BLOCK], float("-inf"), tl.float32)
        lane_token = tl.full([BLOCK], V, tl.int32)
        for start in tl.range(begin, end, BLOCK):
            token = start + tl.arange(0, BLOCK)
            logits = tl.load(logits_ptr + token, mask=token < end, other=float("-inf"))
            scores = tl.div_rn(logits, temperature)
            noisy = tl.where(scores >= lowest, scores + gumbel(start_word, token), float("-inf"))
            is_better = noisy > lane_best
            lane_best = tl.where(is_better, noisy, lane_best)
            lane_token = tl.where(is_better, token, lane_token)
        value, chosen = best_of(lane_best, lane_token, V)
        is_last = True
        if PARTS > 1:
            tl.store(values_ptr + row * PARTS + part, value)
            tl.store(tokens_ptr + row * PARTS + part, chosen)
            tl.debug_barrier()
            arrived = tl.atomic_add(totals_ptr, 1, sem="acq_rel", scope="gpu") + 1
            is_last = arrived == (num_waits + 1) * PARTS
        if is_last:
            if PARTS > 1:
                parts = tl.arange(0, PARTS)
                values = tl.load(values_ptr + row * PARTS + parts, cache_modifier=".cg")
                tokens = tl.load(tokens_ptr + row * PARTS + parts, cache_modifier=".cg")
                value, chosen = best_of(values, tokens, V)
            is_finite = tl.abs(value) < float("inf")
            tl.store(chosen_ptr + row, tl.where(is_finite, chosen, NONE).to(tl.int64))
            tl.store(next_ptr + row, tl.where(is_finite, chosen, 0).to(tl.int64))


def num_parts(num_rows: int, device: torch.device) -> int:
    """Programs of a row that is searched: a power of two.

    They wait for each other, so all must run at the same time: there are no more than multiprocessors.
    """
    if device.type != "cuda":  # the interpreter runs one program after another
        return 1
    parts, most = 1, torch.cuda.get_device_properties(device).multi_processor_count
    while parts < MAX_PARTS and 2 * parts * num_rows <= most:
        parts *= 2
    return parts
