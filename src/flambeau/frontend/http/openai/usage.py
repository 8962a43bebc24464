"""Usage: how many tokens a request has cost."""

from __future__ import annotations

from typing import Any

from flambeau.wire.generation import Piece


class Usage:
    """Adds up the counts in the last pieces of choices; a prompt counts once, however many choices it has."""

    __slots__ = ("_num_choices", "accepted", "cached", "completion", "drafted", "prompt")

    def __init__(self, num_choices: int) -> None:
        self._num_choices = num_choices  # of each prompt
        self.prompt = self.completion = self.cached = self.drafted = self.accepted = 0

    def add(self, piece: Piece) -> None:
        """Count the last piece of a choice."""
        if piece.index % self._num_choices == 0:
            self.prompt += piece.num_prompt_tokens
            self.cached += piece.num_cached_tokens
        self.completion += piece.num_tokens
        self.drafted += piece.num_drafted
        self.accepted += piece.num_accepted

    def document(self) -> dict[str, Any]:
        """As OpenAI's API has it; tokens that speculation drafted are its predictions."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "audio_tokens": 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.drafted - self.accepted,
                "reasoning_tokens": 0,
                "audio_tokens": 0,
            },
        }
