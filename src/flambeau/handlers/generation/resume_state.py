"""ResumeState: the tokens of a streamed reply, which travel with its parts so that another worker can resume it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import MsgspecError, Struct, msgpack


class ResumeStep(Struct, array_like=True, frozen=True):
    """What one part adds: (choice, its tokens since the part before, whether the choice is finished)."""

    made: list[tuple[int, list[int], bool]]
    seed: int | None = None  # in the first part only


_encode = msgpack.Encoder().encode
_decode = msgpack.Decoder(ResumeStep).decode


@dataclass(slots=True)
class ResumeState:
    """The tokens of each choice so far, the finished choices, and the seed they are sampled with."""

    seed: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)


def encode_step(made: dict[int, list[int]], finished: set[int], seed: int | None) -> bytes:
    return _encode(ResumeStep([(index, tokens, index in finished) for index, tokens in made.items()], seed))


def read_state(steps: Sequence[bytes]) -> ResumeState | None:
    """The sum of all steps; None if the first one is missing or one cannot be decoded."""
    try:
        decoded = [_decode(step) for step in steps]
    except MsgspecError:
        return None
    if not decoded or decoded[0].seed is None:
        return None
    state = ResumeState(decoded[0].seed)
    for step in decoded:
        for index, tokens, is_finished in step.made:
            state.tokens.setdefault(index, []).extend(tokens)
            if is_finished:
                state.finished.add(index)
    return state
