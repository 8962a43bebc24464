"""How far a reply has come: what travels with its parts, so that another worker can go on where this one stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import MsgspecError, Struct, msgpack


class Step(Struct, array_like=True, frozen=True):
    """What a part adds: the tokens of each choice since the part before, and whether they were its last."""

    made: list[tuple[int, list[int], bool]]
    seed: int | None = None  # in the first


_encode = msgpack.Encoder().encode
_decode = msgpack.Decoder(Step).decode


@dataclass(slots=True)
class Progress:
    """The tokens of every choice so far, those that are finished, and the seed they are drawn with."""

    seed: int
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)


def encode_step(made: dict[int, list[int]], finished: set[int], seed: int | None) -> bytes:
    """What is to be kept with the next part."""
    return _encode(Step([(index, tokens, index in finished) for index, tokens in made.items()], seed))


def read_progress(state: Sequence[bytes]) -> Progress | None:
    """The sum of what came with all parts; None where there is none, or none that could be read."""
    try:
        steps = [_decode(one) for one in state]
    except MsgspecError:
        return None
    if not steps or steps[0].seed is None:
        return None
    progress = Progress(steps[0].seed)
    for step in steps:
        for index, tokens, is_finished in step.made:
            progress.tokens.setdefault(index, []).extend(tokens)
            if is_finished:
                progress.finished.add(index)
    return progress
