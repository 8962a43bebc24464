"""WebSocketConnection: pings, late messages, slow readers and the end, on a transport without a network."""

from __future__ import annotations

import asyncio

from flambeau import websocket_frames as frames
from flambeau.frontend.http.listener import HttpLimits, Listener
from flambeau.frontend.http.websocket_connection import (
    MAX_CONTROL_FRAMES,
    MAX_DROPPED_BYTES,
    PING_S,
    PONG_S,
    PROGRESS_BYTES,
    TURN_FRAMES,
    WebSocketConnection,
)
from flambeau.serving.reply_budget import ReplyBudget

LIMITS = HttpLimits(max_body_bytes=1000, share_from_bytes=1 << 20, keep_alive_s=60, read_timeout_s=30)


class FakeTransport:
    def __init__(self):
        self.sent = b""
        self.unsent_bytes = 0
        self.ended = ""
        self.is_reading = True

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
        assert self.is_reading
        self.is_reading = False

    def resume_reading(self):
        assert not self.is_reading
        self.is_reading = True

    def frames(self):
        sent, self.sent = self.sent, b""
        return [*frames.FrameReader(max_bytes=1 << 20, is_masked=False).feed(sent)]


class FakeSession:
    is_busy = False
    waiting_bytes = 0

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


def opened(listener=None):
    transport, session = FakeTransport(), FakeSession()
    connection = WebSocketConnection(listener or Listener(None, LIMITS, None), transport, "", "1.2.3.4:5", session)
    return connection, transport, session


def closed_with(transport):
    """The status of the close frame, which is the last one."""
    opcode, payload = transport.frames()[-1]
    assert opcode == frames.CLOSE
    return frames.read_close(payload)[0]


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
    assert closed_with(transport) == 4408
    assert session.calls[-1] == "closed"


async def test_single_bytes_and_pings_give_a_message_no_more_time():
    connection, transport, _ = opened()
    began = connection.since
    connection.receive(b"\x01\x81\0\0\0\0a")
    for _ in range(3):
        connection.receive(b"\x00\x81\0\0\0\0b" + sent_by_client(frames.PING))
    connection.close_if_stale(began + LIMITS.read_timeout_s - 1)
    assert not {frames.CLOSE} & {frame.opcode for frame in transport.frames()}
    connection.close_if_stale(began + LIMITS.read_timeout_s + 2)
    assert closed_with(transport) == 4408


async def test_large_message_that_keeps_growing_has_more_time():
    connection, transport, session = opened(listener_for(1 << 30))
    now = connection.since
    connection.receive(b"\x82\xff" + (1 << 20).to_bytes(8, "big") + b"\0\0\0\0")
    for i in range(1, 4):
        connection.receive(b"x" * PROGRESS_BYTES)
        assert not transport.is_reading
        await asyncio.sleep(0)
        assert transport.is_reading
        connection.close_if_stale(now + i * (LIMITS.read_timeout_s - 1))
    connection.receive(b"x" * PROGRESS_BYTES)
    await asyncio.sleep(0)
    assert session.calls == [(b"x" * (1 << 20), False)]
    assert {frame.opcode for frame in transport.frames()} == {frames.PING}


def listener_for(total_bytes):
    limits = HttpLimits(max_body_bytes=1 << 30, share_from_bytes=1 << 20, keep_alive_s=60, read_timeout_s=30)
    return Listener(None, limits, None, messages=ReplyBudget(total_bytes=total_bytes))


async def test_unfinished_messages_of_all_clients_have_a_common_limit():
    listener = listener_for(1 << 20)
    clients = [opened(listener) for _ in range(3)]
    for size, (connection, _, _) in zip((200_000, 600_000, 300_000), clients, strict=True):
        connection.receive(b"\x82\xff" + (1 << 20).to_bytes(8, "big") + b"\0\0\0\0" + b"x" * size)
    assert [bool(transport.sent) for _, transport, _ in clients] == [False, True, False]
    assert closed_with(clients[1][1]) == frames.TRY_LATER
    for _ in range(10):  # turns
        await asyncio.sleep(0)
    assert listener.messages.held_bytes == 500_000
    for connection, _, _ in clients:
        connection.connection_lost(None)
    assert listener.messages.held_bytes == 0


async def test_nothing_is_kept_of_what_a_client_sends_after_the_servers_close():
    connection, transport, session = opened()
    connection.receive(b"\x83\x80\0\0\0\0" + sent_by_client(frames.TEXT, b"behind it"))
    assert closed_with(transport) == frames.PROTOCOL_ERROR
    connection.receive(bytes(MAX_DROPPED_BYTES))
    assert transport.is_reading
    connection.receive(b"\0")
    assert not transport.is_reading
    assert connection._reader.held_bytes == 0
    assert (session.calls, transport.sent) == (["closed"], b"")


async def test_answer_to_the_servers_close_ends_the_connection():
    connection, transport, _ = opened()
    connection.close(4503, "broken")
    connection.receive(sent_by_client(frames.TEXT, b"on its way"))
    assert not transport.ended
    connection.receive(sent_by_client(frames.CLOSE, frames.close_payload(4503)))
    assert transport.ended == "closed"


async def test_many_small_frames_are_read_in_turns_with_one_pong_each():
    connection, transport, session = opened()
    num_pings = 3 * TURN_FRAMES
    pings = b"".join(sent_by_client(frames.PING, b"%d" % i) for i in range(num_pings))
    connection.receive(pings + sent_by_client(frames.TEXT, b"last"))
    assert transport.frames() == [(frames.PONG, b"%d" % (TURN_FRAMES - 1))]
    assert not transport.is_reading
    for _ in range(10):
        await asyncio.sleep(0)
    assert transport.frames()[-1] == (frames.PONG, b"%d" % (num_pings - 1))
    assert session.calls == [(b"last", True)]
    assert transport.is_reading


async def test_flood_of_control_frames_is_closed():
    connection, transport, _ = opened()
    connection.receive(sent_by_client(frames.PONG) * (MAX_CONTROL_FRAMES + 1))
    while not transport.sent:
        await asyncio.sleep(0)
    assert closed_with(transport) == frames.POLICY


async def test_session_that_pauses_gets_no_more():
    connection, transport, session = opened()
    session.on_message = lambda payload, *, is_text: (session.calls.append(payload), connection.pause_reading())
    connection.receive(sent_by_client(frames.TEXT, b"1") + sent_by_client(frames.TEXT, b"2"))
    assert (session.calls, transport.is_reading) == ([b"1"], False)
    connection.read_on()
    await asyncio.sleep(0)
    assert (session.calls, transport.is_reading) == ([b"1", b"2"], False)
    connection.read_on()
    await asyncio.sleep(0)
    assert transport.is_reading


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
