"""TextStream: tokens → text as they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flambeau.llm.tokenizer import Tokenizer


class TextStream:
    """The text of one sequence."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, stop: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self.stopped_after: int | None = None

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain now."""
        return self._tokenizer.decode([*token_ids])

    def flush(self) -> str:
        """What was held back."""
        return ""
