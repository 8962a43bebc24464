"""StepInputs: the tensors of one forward pass over the tokens of several sequences.

Shapes: T tokens of the step, one sequence after another · S sequences · B blocks of the longest one
"""

from __future__ import annotations

from dataclasses import dataclass

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
