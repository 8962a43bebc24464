"""Who gets a page, where other listeners are, and which events a client accepts."""

from __future__ import annotations

import pytest

from flambeau.client.event_streams import EventReader
from flambeau.config.server import Address
from flambeau.frontend.http.inference import accepts_events, to_event
from flambeau.frontend.http.pages import other_address, prefers_html


def test_only_who_names_html_gets_a_page():
    assert prefers_html("text/html,application/xhtml+xml,*/*;q=0.8")
    assert not any(map(prefers_html, ("", "*/*", "application/json")))


@pytest.mark.parametrize(
    ("address", "host", "expected"),
    [
        (Address("127.0.0.1", 8081), "localhost:8080", "http://127.0.0.1:8081"),
        (Address("0.0.0.0", 8081), "models.local:8080", "http://models.local:8081"),
        (Address("0.0.0.0", 8081), None, "http://localhost:8081"),
        (Address("::", 8081, is_tls=True), "[::1]:8080", "https://[::1]:8081"),
        (Address("127.0.0.1", 0), "localhost", ""),
        (Address(path="/a/b"), "localhost", ""),
    ],
)
def test_other_listener_is_named_as_the_client_can_reach_it(address, host, expected):
    assert other_address(address, host) == expected


def test_events_must_be_named_to_be_accepted():
    for accept in ("text/event-stream", "application/json, Text/Event-Stream;q=0.5", "text/event-stream; q=0.01"):
        assert accepts_events(accept), accept
    for accept in ("", "*/*", "text/*", "text/event-stream;q=0", "text/event-stream; q=0.0"):
        assert not accepts_events(accept), accept


@pytest.mark.parametrize("part", ["a", "a\n", "\n\nb", "data: x\n\n", ": c", "ü"])
def test_text_is_what_it_was_after_its_event(part):
    [event] = EventReader().feed(to_event(part.encode()))
    assert (event.kind, event.data) == ("message", part)


@pytest.mark.parametrize("part", [b"\xff", b"a\r\nb", b"\r"])
def test_what_an_event_would_change_is_base64(part):
    assert to_event(part).startswith(b"event: base64\ndata: ")
