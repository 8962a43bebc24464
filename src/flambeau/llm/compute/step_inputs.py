"""StepInputs: the tensors of one forward pass over the tokens of several sequences.

They are made on the host, and taken to the device by whoever computes there.

Shapes: T tokens of the step, one sequence after another · S sequences · B blocks of the longest one
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class StepInputs:
    """Which tokens are computed, where their keys and values go, and what each of them may look at."""

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    query_starts: Tensor  # [S+1]: where the tokens of each sequence begin
    context_lens_S: Tensor  # tokens of each sequence up to the last of this step, with padding where there is any
    block_tables_SB: Tensor
    # Every sequence has so many tokens in this step; 0: each has its own number.
    query_len: int = field(default=0, kw_only=True)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in order: what a compiled step takes."""
        places = self.ids_T, self.positions_T, self.slots_T
        return *places, self.query_starts, self.context_lens_S, self.block_tables_SB

    def to(self, device: torch.device) -> StepInputs:
        """The same, on a device."""
        if all(tensor.device == device for tensor in self.tensors):
            return self
        moved = (tensor.to(device, non_blocking=True) for tensor in self.tensors)
        return StepInputs(*moved, query_len=self.query_len)
