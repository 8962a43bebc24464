"""Search for inputs that break a target: mutations of the corpus by hypothesis, within a time limit, from a seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from scorecard.fuzzing import corpus
from scorecard.fuzzing.targets import Target, run_target

BATCH = 100  # examples between two looks at the clock
MAX_MUTATIONS = 6


@dataclass(frozen=True, slots=True)
class Fault:
    """An input that broke a target, as small as the search could make it."""

    data: bytes
    error: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    num_inputs: int
    faults: list[Fault]


def mutations(seeds: list[bytes], tokens: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Bytes: a seed with some of its pieces removed, repeated, overwritten or joined with another seed, or random."""
    position = st.floats(0, 1, exclude_max=True)
    piece = st.one_of(st.sampled_from(tokens), st.binary(max_size=8), st.sampled_from([b"\x00", b"\xff", b"9" * 30]))
    change = st.tuples(st.sampled_from(["insert", "overwrite", "remove", "repeat", "cut"]), position, piece)
    changed = st.builds(
        apply_changes, st.sampled_from(seeds), st.lists(change, max_size=MAX_MUTATIONS), st.sampled_from(seeds)
    )
    return st.one_of(changed, changed, changed, st.lists(piece, max_size=12).map(b"".join), st.binary(max_size=200))


def apply_changes(data: bytes, changes: list[tuple[str, float, bytes]], other: bytes) -> bytes:
    for kind, share, piece in changes:
        at = int(share * (len(data) + 1))
        length = max(1, len(piece))
        match kind:
            case "insert":
                data = data[:at] + piece + data[at:]
            case "overwrite":
                data = data[:at] + piece + data[at + length :]
            case "remove":
                data = data[:at] + data[at + length :]
            case "repeat":
                data = data[:at] + data[at : at + 64] * min(8, length) + data[at:]
            case "cut":
                data = data[:at] + other[int(share * len(other)) :]
    return data


def search(target: Target, *, seconds: float, start: int = 0, max_faults: int = 5) -> SearchResult:
    """Try inputs until the time is over; reproducible: the n-th batch of a start is always the same."""
    deadline = time.monotonic() + seconds
    seeds = corpus.inputs_of(target.name)
    strategy = mutations(seeds, target.tokens)
    tried = 0
    faults: dict[str, Fault] = {}
    number = start * 1_000_000
    while time.monotonic() < deadline and len(faults) < max_faults:
        count, fault = one_batch(strategy, lambda data: run_target(target, data), number)
        tried += count
        number += 1
        if fault is not None:
            faults.setdefault(fault.error[:80], fault)
    return SearchResult(tried, [*faults.values()])


def one_batch(
    strategy: st.SearchStrategy[bytes], check: Callable[[bytes], None], number: int
) -> tuple[int, Fault | None]:
    """Try some inputs; the first that fails is made smaller."""
    tried = 0
    last: list[bytes] = []

    @seed(number)
    @settings(
        max_examples=BATCH,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(data=strategy)
    def attempt(data: bytes) -> None:
        nonlocal tried
        tried += 1
        try:
            check(data)
        except Exception:
            last[:] = [data]
            raise

    try:
        attempt()
    except Exception as error:
        notes: Any = type(error).__name__
        return tried, Fault(last[0] if last else b"", f"{notes}: {error}"[:500])
    return tried, None
