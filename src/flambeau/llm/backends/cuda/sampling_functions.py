"""What the sampling kernels share: the order of scores, their shares of the probability, and the noise.

Shares are integers: their sum depends on no order.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from flambeau.llm.core.outputs import NO_TOKEN
from flambeau.llm.sampling import rng

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


@triton.jit
def num_reached(one, two, three, limit):  # type: ignore[no-untyped-def]
    """How many of three numbers reach the limit."""
    return (one >= limit).to(tl.int64) + (two >= limit).to(tl.int64) + (three >= limit).to(tl.int64)


@triton.jit
def shares_of(scores, best):  # type: ignore[no-untyped-def]
    return (tl.exp(scores - best) * ONE_SHARE).to(tl.int64)


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
