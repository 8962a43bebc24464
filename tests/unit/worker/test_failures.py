"""What a worker says when its model cannot be loaded, and whether that is its last word."""

from __future__ import annotations

import pytest

from flambeau.errors import ConfigError, HandlerError
from flambeau.llm.errors import BadRequest, CheckpointError, LLMError, NoRoom, TokenizerError
from flambeau.worker.failures import load_failed


class OwnError(Exception):
    """A handler's own, which knows that it cannot heal."""

    is_final = True


def raised(error):
    try:
        raise error
    except Exception as caught:
        return load_failed(caught)


@pytest.mark.parametrize(
    "error", [HandlerError, ConfigError, LLMError, CheckpointError, TokenizerError, BadRequest, OwnError]
)
def test_error_that_says_it_cannot_heal_is_told_in_one_line(error):
    failed = raised(error("there is no tokenizer:\n\tput one there"))
    assert failed.is_final
    assert failed.message == "there is no tokenizer: put one there"
    assert "Traceback" in failed.detail


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("not now"), "ValueError: not now"),
        (NoRoom("no memory is left"), "flambeau.llm.errors.NoRoom: no memory is left"),
        (HandlerError("no network", is_final=False), "flambeau.errors.HandlerError: no network"),
        (HandlerError("CUDA error: out of memory"), "flambeau.errors.HandlerError: CUDA error: out of memory"),
        (HandlerError(""), "flambeau.errors.HandlerError"),
    ],
)
def test_other_errors_may_be_gone_at_the_next_try(error, message):
    failed = raised(error)
    assert not failed.is_final
    assert failed.message == message


def test_nothing_is_final_where_files_are_watched():
    assert not load_failed(HandlerError("no class"), may_change=True).is_final
