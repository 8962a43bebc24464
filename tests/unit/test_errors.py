"""suggest(): what a misspelled name probably means."""

from __future__ import annotations

from flambeau.errors import suggest

KNOWN = ("max_tokens", "min_tokens", "temperature")


def test_the_most_similar_name_is_suggested_in_any_case_and_with_hyphens():
    assert suggest("max_token", KNOWN) == "max_tokens"
    assert suggest("Max-Tokens", KNOWN) == "max_tokens"


def test_nothing_is_suggested_for_names_that_are_too_different_or_too_long():
    assert suggest("color", KNOWN) is None
    assert suggest("tokens", KNOWN, cutoff=0.9) is None
    assert suggest("temperature" * 1_000_000, KNOWN) is None
