"""What the engine raises on purpose.

LLMError
├── CheckpointError   files that are missing, broken or do not fit the architecture
├── TokenizerError    a tokenizer or chat template that cannot be used
├── NoRoom            too little memory is free
└── BadRequest        a request that cannot be generated for; `parameter` names what is wrong with it
"""

from __future__ import annotations


class LLMError(Exception):
    """Anything the engine refuses; the message names the remedy."""

    is_final = True  # trying again would end the same


class CheckpointError(LLMError):
    """A checkpoint that cannot be loaded."""


class TokenizerError(LLMError):
    """A tokenizer or chat template that cannot be used."""


class NoRoom(LLMError):
    """Too little memory is free; that may change."""

    is_final = False


class BadRequest(LLMError):
    """A request that cannot be generated for."""

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter
