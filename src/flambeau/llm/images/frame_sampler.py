"""FrameSampler: which frames of a video are read, as the processors of transformers choose them."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Literal

import numpy as np
import torch

from flambeau.llm.images.video_files import VideoFacts

# How places are chosen: the first of each of so many equal parts, or from the first to the last frame.
Spread = Literal["parts", "ends"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampler:
    """So many frames, or so many a second within limits."""

    spread: Spread
    num_frames: int | None = None
    rate: float | None = None  # frames a second
    min_frames: int
    max_frames: int
    multiple: int = 1  # of which the number of frames is one

    def places(self, facts: VideoFacts) -> list[int]:
        """The frames that are read, each named once or more, in their order."""
        total = facts.num_frames
        if facts.is_sampled:
            return [*range(total)]
        number = self._number(facts)
        if self.spread == "ends":
            return [int(place) for place in np.linspace(0, total - 1, number).round()]
        return [int(place) for place in torch.arange(0, total, total / number).int()]

    def _number(self, facts: VideoFacts) -> int:
        total = facts.num_frames
        if self.num_frames is not None and self.spread == "ends":
            return self.num_frames
        if self.num_frames is not None:
            wanted = round(self.num_frames / self.multiple) * self.multiple
            return min(wanted, total // self.multiple * self.multiple)
        assert self.rate is not None
        wanted_frames = total / facts.rate * self.rate
        if self.spread == "ends":
            return min(max(int(wanted_frames), self.min_frames), self.max_frames, total)
        most = floor(min(self.max_frames, total) / self.multiple) * self.multiple
        return floor(min(max(wanted_frames, self.min_frames), most) / self.multiple) * self.multiple
