"""suggest(): what a misspelled name probably means. explain_json(): why a text is not JSON."""

from __future__ import annotations

import pytest

from flambeau.errors import FlambeauError, explain_json, suggest

KNOWN = ("max_tokens", "min_tokens", "temperature")


def test_the_most_similar_name_is_suggested_in_any_case_and_with_hyphens():
    assert suggest("max_token", KNOWN) == "max_tokens"
    assert suggest("Max-Tokens", KNOWN) == "max_tokens"


def test_nothing_is_suggested_for_names_that_are_too_different_or_too_long():
    assert suggest("color", KNOWN) is None
    assert suggest("tokens", KNOWN, cutoff=0.9) is None
    assert suggest("temperature" * 1_000_000, KNOWN) is None


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'\xef\xbb\xbf{"a": 1}', "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16; send UTF-8"),
        (rb'{"a": ["\ud800"]}', "half of a surrogate pair"),
        (rb'{"a": "\ud83d\ude00", "b": NaN}', "a value that JSON does not have"),
        (b'{"a": }', "line 1, column 7"),
        (b"", "empty"),
        (b"\x1f\x8b\x08\x00", "content-encoding: gzip"),
        (b"\x1f\x8b\x08\x00".replace(b"\x8b", b"\xff"), "is not valid UTF-8"),
    ],
)
def test_a_text_that_is_not_json_is_explained(raw, expected):
    assert expected in explain_json(raw)


@pytest.mark.parametrize(
    ("text", "cause", "expected"),
    [
        ("it failed.", "line 1\nline 2", "it failed: line 1"),
        ("it failed: line 1", "line 1", "it failed: line 1"),
        ("it failed.", "", "it failed."),
    ],
)
def test_the_first_line_of_the_cause_follows_the_text_unless_it_is_in_it(text, cause, expected):
    assert FlambeauError(text, cause=cause).with_reason == expected
