"""StepInputs: the tensors of one forward pass over the tokens of several sequences.

They are made on the host, and taken to the device by whoever computes there.

Shapes: T tokens of the step, one sequence after another · S sequences · B blocks of the longest one
"""

from __future__ import annotations

from dataclasses import dataclass

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
    query_len: int = 0  # every sequence has so many tokens in this step; 0: each has its own number

    def to(self, device: torch.device) -> StepInputs:
        """The same, on a device."""
        if all(tensor.device == device for tensor in (self.ids_T, self.positions_T, self.block_tables_SB)):
            return self
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in TENSORS}
        return StepInputs(**moved, query_len=self.query_len)


TENSORS = ("ids_T", "positions_T", "slots_T", "query_starts", "context_lens_S", "block_tables_SB")
