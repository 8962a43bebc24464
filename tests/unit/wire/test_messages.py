"""header(): a header by its name."""

from __future__ import annotations

from flambeau.wire.messages import header


def test_the_first_header_of_a_name_is_found_in_any_case():
    headers = [("Accept", "a"), ("X-Id", "1"), ("x-id", "2")]
    assert (header(headers, "x-id"), header(headers, "accept"), header(headers, "host")) == ("1", "a", None)
