"""The exceptions that the engine raises.

LLMError
├── CheckpointError   files that are missing, broken or do not fit the architecture
│   └── InvalidConfig a config.json that no network could have
├── TokenizerError    a tokenizer or chat template that cannot be used
├── NoRoom            too little memory is free
└── InvalidRequest    a request with an invalid prompt or setting; `parameter` names it
"""

from __future__ import annotations


class LLMError(Exception):
    """Base class; the message names the remedy."""

    is_final = True  # another attempt would fail in the same way


class CheckpointError(LLMError):
    """A checkpoint that cannot be loaded."""


class InvalidConfig(CheckpointError):
    """A config.json with values that are missing, wrong or contradict each other."""


class TokenizerError(LLMError):
    """A tokenizer or chat template that cannot be used."""


class NoRoom(LLMError):
    """Too little memory is free at the moment."""

    is_final = False


class InvalidRequest(LLMError):
    """A request with an invalid prompt or setting."""

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter
