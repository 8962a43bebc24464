"""WebSocketConnection: pings, late messages, slow readers and the end, on a transport without a network."""

from __future__ import annotations

import pytest

from flambeau import websocket_frames as frames
from flambeau.frontend.http.listener import HttpLimits, Listener
from flambeau.frontend.http.websocket import PING_S, PONG_S, WebSocketConnection, type_of

LIMITS = HttpLimits(max_body_bytes=1000, share_from_bytes=1 << 20, keep_alive_s=60, read_timeout_s=30)


class FakeTransport:
    def __init__(self):
        self.sent = b""
        self.unsent_bytes = 0
        self.ended = ""

    def write(self, data):
        self.sent += data

    def get_write_buffer_size(self):
        return self.unsent_bytes

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def is_closing(self):
        return bool(self.ended)

    def close(self):
        self.ended = self.ended or "closed"

    def abort(self):
        self.ended = "aborted"

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def frames(self):
        sent, self.sent = self.sent, b""
        return [*frames.FrameReader(max_bytes=1 << 20, is_masked=False).feed(sent)]


class FakeSession:
    is_busy = False

    def __init__(self):
        self.calls = []

    def on_message(self, payload, *, is_text):
        self.calls.append((payload, is_text))

    def on_closed(self):
        self.calls.append("closed")

    def pause(self, excess_bytes):
        self.calls.append("pause")

    def resume(self):
        self.calls.append("resume")

    def proceed(self):
        self.calls.append("proceed")


def opened():
    transport, session = FakeTransport(), FakeSession()
    connection = WebSocketConnection(Listener(None, LIMITS, None), transport, "", "1.2.3.4:5", session)
    return connection, transport, session


def sent_by_client(opcode, payload=b""):
    return frames.encode_frame(opcode, payload, is_masked=True)


async def test_silent_client_is_pinged_and_given_up_without_an_answer():
    connection, transport, _ = opened()
    now = connection.since
    connection.close_if_stale(now + PING_S - 1)
    assert transport.frames() == []
    connection.close_if_stale(now + PING_S + 1)
    assert transport.frames() == [(frames.PING, b"")]
    connection.close_if_stale(now + PING_S + PONG_S)
    assert not transport.ended
    connection.close_if_stale(now + PING_S + PONG_S + 2)
    assert transport.ended == "aborted"


async def test_client_that_answers_the_ping_stays():
    connection, transport, _ = opened()
    connection.close_if_stale(connection.since + PING_S + 1)
    connection.receive(sent_by_client(frames.PONG))
    connection.close_if_stale(connection.since + PING_S - 1)
    assert not transport.ended


async def test_message_that_does_not_arrive_whole_in_time_closes():
    connection, transport, session = opened()
    connection.receive(sent_by_client(frames.TEXT, b"whole") + sent_by_client(frames.TEXT, b"half")[:-1])
    assert session.calls == [(b"whole", True)]
    connection.close_if_stale(connection.since + LIMITS.read_timeout_s + 1)
    [(opcode, payload)] = transport.frames()
    assert (opcode, frames.read_close(payload)[0]) == (frames.CLOSE, frames.PROTOCOL_ERROR)
    assert session.calls[-1] == "closed"


async def test_client_that_falls_behind_pauses_its_session_once():
    connection, transport, session = opened()
    transport.unsent_bytes = 5 << 20
    connection.pause_writing()
    connection.send(b"x", is_text=False)
    assert session.calls == ["pause"]
    transport.unsent_bytes = 0
    connection.resume_writing()
    assert session.calls == ["pause", "resume", "proceed"]
    transport.unsent_bytes = 100 << 20
    connection.pause_writing()
    assert transport.ended == "aborted"


async def test_server_that_stops_says_so_and_sends_nothing_more():
    connection, transport, session = opened()
    connection.close_if_idle()
    [(_, payload)] = transport.frames()
    assert frames.read_close(payload) == (frames.GOING_AWAY, "the server stops")
    assert (transport.ended, session.calls) == ("closed", ["closed"])
    connection.send(b"late", is_text=False)
    assert transport.sent == b""


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
