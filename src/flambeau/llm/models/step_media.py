"""StepMedia: the tokens of a step that stand for parts of files, and the positions that depend on images.

Shapes: T tokens of the step · M of files · E the decoder's hidden size · L its first layers that get more
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepMedia:
    """What differs in a step with files from one with text alone."""

    rows_M: Tensor
    features_ME: Tensor  # instead of the embeddings of these tokens; [M, (1 + L) E]: then what the first layers add
    last_seen_T: Tensor | None = None  # the last position that each token attends to; None: its own
    rotary_3T: Tensor | None = None  # what rotates queries and keys: time, row and column; None: positions do

    def to(self, device: torch.device) -> StepMedia:
        moved = (None if one is None else one.to(device) for one in (self.last_seen_T, self.rotary_3T))
        return StepMedia(self.rows_M.to(device), self.features_ME.to(device), *moved)
