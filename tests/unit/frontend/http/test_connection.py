"""HttpConnection: requests and responses on one connection, with a transport that only records."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from flambeau.errors import InvalidKey
from flambeau.frontend.http.connection import MAX_PIPELINED, SMALL_BODY_BYTES, HttpConnection
from flambeau.frontend.http.listener import TURN_S, ConnectionRoom, HttpLimits, Listener, TurnQueue
from flambeau.serving.reply_budget import MAX_HELD_BYTES

GET = b"GET /%d HTTP/1.1\r\n\r\n"
LARGE = SMALL_BODY_BYTES + 1


class Transport:
    def __init__(self):
        self.sent, self.is_reading, self.is_closed, self.is_aborted, self.unsent = b"", True, False, False, 0

    def write(self, data):
        self.sent += data

    def close(self):
        self.is_closed = True

    def abort(self):
        self.is_closed = self.is_aborted = True

    def is_closing(self):
        return self.is_closed

    def can_write_eof(self):
        return False

    def get_write_buffer_size(self):
        return self.unsent

    def set_write_buffer_limits(self, high=None, low=None):
        self.limits = (high, low)

    def get_extra_info(self, name):
        return ("127.0.0.1", 1) if name == "peername" else None

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True


class App:
    """Keeps exchanges; the test responds."""

    def __init__(self):
        self.exchanges, self.rejected, self.admits = [], [], True

    def handle(self, exchange):
        self.exchanges.append(exchange)

    def admit(self, exchange):
        if not self.admits:
            raise InvalidKey("no key")

    def reject(self, exchange, error):
        self.rejected.append(error)
        exchange.respond(401, b"")

    def too_large(self, exchange, limit):
        exchange.respond(413, b"")

    def malformed(self, exchange, reason):
        exchange.respond(400, b"")


class Client:
    """One connection; must be made within an event loop."""

    def __init__(self, **limits):
        self.app, self.transport = App(), Transport()
        defaults = {"max_body_bytes": 200_000, "share_from_bytes": 1 << 40, "keep_alive_s": 60, "read_timeout_s": 30}
        room = ConnectionRoom(limits.pop("max_connections", 1000))
        self.listener = Listener(self.app, HttpLimits(**{**defaults, **limits}), None, room=room)
        self.connection = HttpConnection(self.listener)
        self.connection.connection_made(self.transport)

    def send(self, data):
        for start in range(0, len(data), 100_000):
            piece = data[start : start + 100_000]
            self.connection.get_buffer(0)[: len(piece)] = piece
            self.connection.buffer_updated(len(piece))

    @property
    def statuses(self):
        return [int(line.split()[1]) for line in self.transport.sent.split(b"\r\n") if line.startswith(b"HTTP/1.1")]


async def test_pipelined_requests_are_handled_one_after_another():
    client = Client()
    client.send(b"".join(GET % i for i in range(3)))
    assert [exchange.path for exchange in client.app.exchanges] == ["/0"]
    for i in range(3):
        client.app.exchanges[i].respond(200 + i, b"")
        await asyncio.sleep(0)
    assert client.statuses == [200, 201, 202]
    assert not client.transport.is_closed


async def test_a_client_with_many_pipelined_requests_is_not_read_until_they_are_answered():
    client = Client()
    client.send(b"".join(GET % i for i in range(MAX_PIPELINED + 1)))
    assert not client.transport.is_reading
    client.app.exchanges[0].respond(200, b"")
    await asyncio.sleep(0)
    assert client.transport.is_reading


async def test_the_connection_closes_after_the_response_if_the_client_asks_for_it():
    client = Client()
    client.send(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
    client.app.exchanges[0].respond(200, b"")
    assert client.transport.is_closed


async def test_a_disconnected_client_cancels_its_request():
    client = Client()
    cancelled = []
    client.send(GET % 0 + GET % 1)
    client.app.exchanges[0].on_gone = lambda: cancelled.append(True)
    client.connection.connection_lost(None)
    assert cancelled == [True]
    assert client.listener.connections == set()
    client.app.exchanges[0].respond(200, b"")  # nothing is left to write to
    assert client.transport.sent == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 200001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n30d41\r\n" + b"x" * 200_001, 413),
    ],
)
async def test_a_rejected_request_gets_its_status_and_further_input_is_ignored(data, status):
    client = Client()
    client.send(data + b"\r\n" + GET % 0)
    assert (client.statuses, client.app.exchanges) == ([status], [])
    assert b"connection: close" in client.transport.sent


@pytest.mark.parametrize("count", [1, 3, 2 * MAX_PIPELINED])
async def test_a_malformed_request_behind_others_is_rejected_after_their_responses(count):
    client = Client()
    client.send(b"".join(GET % i for i in range(count)) + b"nonsense\r\n\r\n")
    assert client.statuses == []
    for i in range(count):
        assert b"connection: close" not in client.transport.sent
        client.app.exchanges[i].respond(200, b"")
        await asyncio.sleep(0)
    assert client.statuses == [200] * count + [400]
    assert b"connection: close" in client.transport.sent


async def test_the_first_request_of_a_read_is_answered_at_once_and_the_others_in_turn():
    client, other = Client(), Client()
    client.app.handle = lambda exchange: exchange.respond(200, b"")
    other.app.handle = lambda exchange: exchange.respond(200, b"")
    other.listener.turns = client.listener.turns = TurnQueue(lambda: 0.0)
    client.send(GET % 0 + GET % 1)
    other.send(GET % 0)
    assert (client.statuses, other.statuses) == ([200], [200])
    await asyncio.sleep(0)
    assert client.statuses == [200, 200]


async def test_a_turn_of_the_loop_has_a_bounded_number_of_pipelined_requests():
    client = Client()
    client.app.handle = lambda exchange: exchange.respond(200, b"")
    ticks = itertools.count(step=TURN_S / 4)
    client.listener.turns = TurnQueue(lambda: next(ticks))
    client.send(b"".join(GET % i for i in range(1000)))
    while len(client.statuses) < 1000:
        before = len(client.statuses)
        await asyncio.sleep(0)
        assert before < len(client.statuses) <= before + 5


async def test_a_long_read_is_parsed_as_its_requests_are_answered():
    client = Client()
    requests = b"".join(GET % i for i in range(3000))
    client.send(requests)
    assert not client.transport.is_reading
    data, start = client.connection._unparsed
    assert (len(data) > len(requests) * 0.9, start) == (True, 0)
    for i in range(3000):
        client.app.exchanges[i].respond(200, b"")
        await asyncio.sleep(0)
    assert [exchange.path for exchange in client.app.exchanges] == [f"/{i}" for i in range(3000)]
    assert client.transport.is_reading


@pytest.mark.parametrize("body_bytes", [1000, 70_000])
async def test_pipelined_bodies_are_complete_however_the_read_is_cut(body_bytes):
    client = Client()
    client.app.handle = lambda exchange: (bodies.append(exchange.take_body().content), exchange.respond(200, b""))
    bodies = []
    sent = [bytes([65 + i]) * body_bytes for i in range(20)]
    client.connection.get_buffer(0)
    stream = b"".join(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body) for body in sent)
    while stream:
        if client.transport.is_reading:
            client.send(stream[:100_000])
            stream = stream[100_000:]
        await asyncio.sleep(0)
    while len(bodies) < len(sent):
        await asyncio.sleep(0)
    assert bodies == sent


async def test_a_client_that_does_not_read_gets_no_further_answers_until_it_does():
    client = Client()
    client.app.handle = lambda exchange: exchange.respond(200, b"")
    client.connection.pause_writing()
    client.send(b"".join(GET % i for i in range(1000)))
    await asyncio.sleep(0)
    assert client.statuses == []
    assert not client.transport.is_reading
    client.connection.resume_writing()
    while len(client.statuses) < 1000:
        await asyncio.sleep(0)
    assert client.transport.is_reading


async def test_without_an_idle_connection_to_close_a_client_is_refused():
    client = Client(max_connections=1)
    client.send(GET % 0)
    refused = Transport()
    client.app.reject = lambda exchange, error: exchange.respond(503, str(error).encode())
    HttpConnection(client.listener).connection_made(refused)
    assert refused.sent.startswith(b"HTTP/1.1 503")
    assert b"limit of open files" in refused.sent
    assert not client.transport.is_closed


@pytest.mark.parametrize(
    "head", [b"content-length: %d\r\n\r\n" % LARGE, b"content-length: 1\r\nexpect: 100-continue\r\n\r\n"]
)
async def test_a_large_body_is_rejected_before_it_arrives_if_the_key_is_missing(head):
    client = Client()
    client.app.admits = False
    client.send(b"POST / HTTP/1.1\r\n" + head)
    assert client.statuses == [401]
    assert client.listener.unfinished_bytes == 0


async def test_a_client_that_expects_it_gets_100_continue():
    client = Client()
    client.send(b"POST / HTTP/1.1\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
    assert client.statuses == [100]
    client.send(b"ab")
    assert client.app.exchanges[0].body.content == b"ab"


async def test_large_bodies_are_counted_while_they_arrive():
    client = Client()
    client.send(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\nx" % LARGE)
    assert client.listener.unfinished_bytes == LARGE
    client.send(b"x" * (LARGE - 1))
    assert client.listener.unfinished_bytes == 0
    assert client.app.exchanges[0].body.content == b"x" * LARGE


async def test_with_too_many_large_bodies_the_slowest_connection_is_closed():
    client = Client(max_unfinished_bytes=LARGE + 100)
    slow = HttpConnection(client.listener)
    slow_transport = Transport()
    slow.connection_made(slow_transport)
    slow.get_buffer(0)[:60] = (b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % LARGE).ljust(60, b"x")
    slow.buffer_updated(60)
    client.send(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % LARGE)
    assert (slow_transport.is_aborted, client.transport.is_aborted) == (True, False)
    assert client.listener.unfinished_bytes == LARGE


async def test_a_request_has_less_time_than_an_idle_connection():
    client = Client()
    now = asyncio.get_running_loop().time()
    client.listener.sweep(now + 59)
    assert not client.transport.is_closed
    client.send(b"GET / HTTP/1.1\r\n")
    client.listener.sweep(now + 31)
    assert client.transport.is_closed


async def test_a_connection_that_waits_for_its_response_is_never_stale():
    client = Client()
    client.send(GET % 0)
    client.listener.sweep(asyncio.get_running_loop().time() + 1000)
    assert not client.transport.is_closed
    assert client.connection.is_busy


async def test_with_too_many_connections_the_longest_idle_one_is_closed():
    client = Client(max_connections=1)
    HttpConnection(client.listener).connection_made(Transport())
    assert client.transport.is_aborted


async def test_a_client_that_does_not_read_its_response_is_disconnected():
    client = Client()
    client.connection.pause_writing()
    client.transport.unsent = 65 << 20
    client.connection.write(b"x")
    assert (client.transport.is_aborted, client.transport.sent) == (True, b"")


class StreamingJob:
    times = None

    def __init__(self):
        self.calls = []

    def pause(self, excess_bytes):
        self.calls.append(excess_bytes)

    def resume(self):
        self.calls.append("resume")


def streaming_client():
    client = Client()
    client.send(GET % 0)
    [exchange] = client.app.exchanges
    exchange.job = job = StreamingJob()
    exchange.start(200)
    return client, exchange, job


async def test_a_client_that_falls_behind_is_not_read_and_its_job_is_paused_at_the_mark():
    client, exchange, job = streaming_client()
    client.transport.unsent = 100_000
    client.connection.pause_writing()
    assert not client.transport.is_reading
    exchange.send([b"x"])
    assert job.calls == []
    client.transport.unsent = MAX_HELD_BYTES + 1
    exchange.send([b"x"])
    exchange.send([b"x"])
    assert job.calls == [MAX_HELD_BYTES // 4 + 1]
    assert client.listener.unread.held_bytes == MAX_HELD_BYTES + 1
    assert client.transport.limits == (MAX_HELD_BYTES, MAX_HELD_BYTES * 3 // 4)


async def test_a_paused_job_goes_on_when_its_client_has_read():
    client, exchange, job = streaming_client()
    client.transport.unsent = 2 * MAX_HELD_BYTES
    client.connection.pause_writing()
    exchange.send([b"x"])
    client.transport.unsent = 0
    client.connection.resume_writing()
    assert job.calls[-1] == "resume"
    assert client.transport.is_reading
    assert client.listener.unread.held_bytes == 0


async def test_pipelined_requests_wait_until_the_responses_before_them_are_read():
    client = Client()
    client.connection.pause_writing()
    client.send(GET % 0 + GET % 1)
    assert client.app.exchanges == []
    client.connection.resume_writing()
    await asyncio.sleep(0)
    assert [exchange.path for exchange in client.app.exchanges] == ["/0"]


async def test_a_large_body_behind_an_unanswered_request_is_not_read_before_its_turn():
    client = Client()
    client.send(GET % 0 + b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % LARGE)
    assert not client.transport.is_reading
    client.app.exchanges[0].respond(200, b"")
    assert client.transport.is_reading
    client.send(b"x" * LARGE)
    assert client.app.exchanges[1].body.size_bytes == LARGE


async def test_bodies_that_wait_stop_the_reading_by_their_size():
    client = Client()
    body = b"x" * 40_000
    client.send(GET % 0 + (b"POST / HTTP/1.1\r\ncontent-length: 40000\r\n\r\n" + body) * 2)
    assert not client.transport.is_reading
    for i in range(2):
        client.app.exchanges[i].respond(200, b"")
        await asyncio.sleep(0)
    assert client.transport.is_reading


async def test_a_client_that_reads_nothing_in_time_is_disconnected_though_its_response_goes_on(caplog):
    client, exchange, _ = streaming_client()
    client.transport.unsent = 100_000
    client.connection.pause_writing()
    exchange.send([b"x"])
    client.listener.sweep(asyncio.get_running_loop().time() + 59)
    assert not client.transport.is_closed
    client.listener.sweep(asyncio.get_running_loop().time() + 61)
    assert client.transport.is_aborted
    assert "response_read_timeout" in caplog.text


async def test_a_client_that_is_gone_holds_nothing():
    client, exchange, _ = streaming_client()
    client.transport.unsent = 100_000
    client.connection.pause_writing()
    exchange.send([b"x"])
    client.connection.connection_lost(None)
    assert client.listener.unread.held_bytes == 0
    assert exchange.job is None
