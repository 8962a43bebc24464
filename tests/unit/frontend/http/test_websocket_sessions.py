"""ModelSession: what a message is for the handler."""

from __future__ import annotations

import pytest

from flambeau.frontend.http.websocket_sessions import type_of


@pytest.mark.parametrize(
    ("payload", "is_text", "expected"),
    [
        (b' {"a": 1}', True, "application/json"),
        (b"[1]", True, "application/json"),
        (b"12", True, "text/plain; charset=utf-8"),
        (b"{}", False, "application/octet-stream"),
    ],
)
def test_content_type_of_a_message(payload, is_text, expected):
    assert type_of(payload, is_text=is_text) == expected
