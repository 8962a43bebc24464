"""Grammar masks on a GPU: bits that forbid tokens before they are sampled, as a part of a captured graph.

Shapes: T rows · V vocabulary · B words of 32 tokens
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.sampling.grammar_masks import Bits

BLOCK = 1024  # tokens of a program
NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def mask_logits_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, words_ptr, V: tl.constexpr, NUM_WORDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add -inf to the logits of one block of a row that are not allowed: NaN stays, as in `grammar_masks.masked`."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + row * NUM_WORDS + token // 32, mask=token < V, other=-1)
    is_forbidden = (token < V) & (((words >> (token % 32)) & 1) == 0)
    logits = tl.load(logits_ptr + row * V + token, mask=is_forbidden, other=0.0)
    tl.store(logits_ptr + row * V + token, logits - float("inf"), mask=is_forbidden)


class TokenMasks:
    """The masks of a captured step, at a fixed address."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._words = torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)

    def set(self, bits_SB: Bits) -> None:
        """Use these masks for the first rows; the other rows are padding."""
        words = torch.empty(bits_SB.shape, dtype=torch.int32, pin_memory=self._words.is_cuda)
        words.numpy()[:] = bits_SB
        self._words[: len(bits_SB)].copy_(words, non_blocking=True)  # pinned memory is not reused before it is done

    def apply(self, logits_TV: Tensor) -> None:
        """Change the logits in place."""
        num_rows, vocab_size = logits_TV.shape
        mask_logits_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
            logits_TV, self._words,
            V=vocab_size, NUM_WORDS=self._words.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS,
        )  # fmt: skip
