"""NgramShape: embeddings of the last tokens together, whose rows a hash finds (Qwen 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt

from flambeau.llm.models.families.recurrence import StateShapes

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # of the generator SplitMix64
FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
SEED_STEP = 10007  # between the seeds of tables


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramShape:
    """Some layers add to the streams what a table has for the last two tokens, the last three, …"""

    layers: tuple[int, ...]  # with a table each, in order
    size: int  # of the numbers of all heads
    longest: int  # tokens that are looked up together
    num_heads: int  # of each number of tokens: rows of different hashes
    least_rows: int  # of a head; it has a prime number of them
    multiple: int  # of the rows of a table
    seed: int
    vocab_size: int
    eos_id: int  # which nothing before it is looked up with
    conv_width: int
    num_files: int  # tensors that a table is divided into, in the files only

    @property
    def num_all_heads(self) -> int:
        return (self.longest - 1) * self.num_heads

    @property
    def num_window(self) -> int:
        """The places before a token that the convolution reads, with gaps between them."""
        return (self.conv_width - 1) * self.longest

    def states(self, width: int) -> StateShapes:
        """The last tokens, counted from the one that ends a text, so that zeros are none; and a window."""
        return (self.longest - 1,), (width, self.num_window)

    def rows(self, layer: int) -> tuple[int, ...]:
        """Of each head of a layer's table: primes that no other head has."""
        first, primes = self.layers.index(layer) * self.num_all_heads, primes_from(self.least_rows)
        every = [next(primes) for _ in range(first + self.num_all_heads)]
        return tuple(every[first:])

    def num_rows(self, layer: int) -> int:
        """Of a layer's table, with padding."""
        return -(-sum(self.rows(layer)) // self.multiple) * self.multiple

    def multipliers(self, layer: int) -> tuple[int, ...]:
        """Odd numbers, by which tokens are multiplied; a product has less than 64 bits."""
        half = max(1, ((1 << 63) - 1) // max(self.vocab_size, 1) // 2)
        seed = self.seed + SEED_STEP * self.layers.index(layer)
        return tuple(2 * (mixed(seed + GOLDEN * (i + 2)) % half) + 1 for i in range(self.longest))


def mixed(value: int) -> int:
    """The output function of SplitMix64."""
    value &= MASK
    for shift, factor in FACTORS:
        value = (value ^ (value >> shift)) * factor & MASK
    return value ^ (value >> 31)


def primes_from(least: int) -> Iterator[int]:
    number = max(2, least)
    while True:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            yield number
        number += 1
