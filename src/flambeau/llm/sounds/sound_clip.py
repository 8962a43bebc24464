"""SoundClip: the samples of a sound in a request, at the rate of the model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from flambeau.llm.errors import InvalidRequest

LONGEST_S = 2400.0  # of the sounds of one request: their samples take 154 MB, and what is made of them about as much


@dataclass(frozen=True, kw_only=True)
class SoundClip:
    """One channel of samples, from -1 to 1; `name` is its place in the request."""

    samples: NDArray[np.float32]
    rate: int  # samples per second
    name: str

    @cached_property
    def digest(self) -> bytes:
        """Tells its samples from others."""
        return hashlib.sha256(b"%d:%b" % (self.rate, self.samples.tobytes())).digest()

    @property
    def length_s(self) -> float:
        return len(self.samples) / self.rate


def too_long(name: str, length_s: float, longest_s: float) -> InvalidRequest:
    return InvalidRequest(
        f"{name} is a sound of {length_s:.1f} s, and the model reads {longest_s:g} s; cut it, and send a part of it",
        name,
    )


def too_short(sound: SoundClip) -> InvalidRequest:
    return InvalidRequest(
        f"{sound.name} is a sound of {sound.length_s:.4f} s, which is too short for this model; send a longer one",
        sound.name,
    )
