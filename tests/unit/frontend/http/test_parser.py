"""RequestParser: bytes → requests, without sockets."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.frontend.http.parser import MAX_HEAD_BYTES, MAX_UPGRADES, MalformedRequest, RequestParser
from flambeau.serving.job import PRIORITY_HEADER


class Receiver:
    """Keeps what the parser reports."""

    def __init__(self, *, max_body_bytes=1000, on_head_from_bytes=100):
        self.requests, self.heads, self.num_too_large = [], [], 0
        self.memory = None
        self.parser = RequestParser(self, max_body_bytes=max_body_bytes, on_head_from_bytes=on_head_from_bytes)

    def feed(self, data):
        self.parser.feed(memoryview(data))
        return self

    def feed_all(self, pieces):
        for piece in pieces:
            self.feed(piece)

    def on_head(self):
        self.heads.append((self.parser.method, self.parser.content_length, self.parser.wants_continue))
        self.parser.memory = self.memory

    def on_too_large(self):
        self.num_too_large += 1
        self.parser.discard()

    def on_upgrade(self, rest):
        return False

    def on_request(self):
        parser = self.parser
        self.requests.append((parser.method, parser.target, bytes(parser.content), parser.keeps_alive))


GET = b"GET /ping?x=1 HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /predictions/m HTTP/1.1\r\ncontent-length: 5\r\n\r\nhello"


def chunked(*chunks):
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"POST /p HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + framed


@pytest.fixture
def receiver():
    return Receiver()


def test_a_request_is_reported_once_it_is_complete(receiver):
    receiver.feed(POST)
    assert receiver.requests == [("POST", b"/predictions/m", b"hello", True)]
    assert not receiver.parser.is_reading
    assert receiver.heads == []


@pytest.mark.parametrize("size", [1, 2, 7])
def test_bytes_may_arrive_in_pieces_of_any_size(receiver, size):
    for start in range(0, len(POST), size):
        assert receiver.requests == []
        receiver.feed(POST[start : start + size])
    assert receiver.requests == [("POST", b"/predictions/m", b"hello", True)]


def test_pipelined_requests_are_reported_in_order(receiver):
    receiver.feed(GET + POST + GET[:10])
    assert [request[0] for request in receiver.requests] == ["GET", "POST"]
    assert (receiver.parser.is_reading, receiver.parser.in_head) == (True, True)


def test_headers_keep_the_clients_spelling_and_the_known_ones_are_read(receiver):
    name = PRIORITY_HEADER
    head = f"GET / HTTP/1.0\r\nX-My-Header: \xe4\r\nX-Request-ID: 7\r\n{name.upper()}: high\r\n\r\n"
    receiver.feed(head.encode("latin-1"))
    parser = receiver.parser
    assert parser.headers == [("X-My-Header", "\xe4"), ("X-Request-ID", "7"), (name.upper(), "high")]
    assert (parser.request_id, parser.priority, parser.version, parser.keeps_alive) == ("7", "high", "1.0", False)


def test_the_idempotency_key_is_read_and_is_not_that_of_the_next_request(receiver):
    receiver.feed(POST.replace(b"\r\n", b"\r\nIDEMPOTENCY-Key:  a b \r\naccept-encoding: gzip\r\n", 1))
    assert receiver.parser.idempotency_key == "a b"
    receiver.feed(POST.replace(b"\r\n", b"\r\nIdempotency-Key:\r\n", 1))
    assert receiver.parser.idempotency_key == ""
    receiver.feed(GET)
    assert receiver.parser.idempotency_key is None


def test_nothing_of_a_request_remains_for_the_next(receiver):
    receiver.feed(POST.replace(b"\r\n", b"\r\nx-request-id: 7\r\n", 1)).feed(GET)
    parser = receiver.parser
    assert (parser.request_id, parser.content, parser.content_length, parser.headers) == ("", b"", 0, [("Host", "a")])


def test_a_chunked_body_is_joined_and_its_trailer_ignored(receiver):
    receiver.feed(chunked(b"ab", b"c", b"def") + b"0\r\nx-request-id: late\r\n\r\n")
    assert receiver.requests == [("POST", b"/p", b"abcdef", True)]
    assert receiver.parser.request_id == ""


def test_the_head_of_a_large_body_is_reported_before_the_body(receiver):
    receiver.feed(b"POST / HTTP/1.1\r\ncontent-length: 100\r\n\r\n")
    assert receiver.heads == [("POST", 100, False)]
    assert receiver.requests == []


def test_a_client_that_waits_for_continue_is_reported(receiver):
    receiver.feed(b"POST / HTTP/1.1\r\ncontent-length: 1\r\nExpect: 100-Continue\r\n\r\n")
    assert receiver.heads == [("POST", 1, True)]


def test_a_large_body_goes_into_the_receivers_memory(receiver):
    receiver.memory = bytearray(100)
    receiver.feed(b"POST / HTTP/1.1\r\ncontent-length: 100\r\n\r\nabc")
    assert (receiver.parser.filled_bytes, receiver.memory[:3]) == (3, b"abc")
    receiver.parser.advance(96)
    assert receiver.requests == []
    receiver.parser.advance(1)
    assert len(receiver.requests) == 1
    receiver.parser.memory = None
    receiver.feed(GET)
    assert len(receiver.requests) == 2


def test_a_chunked_body_over_the_limit_is_reported_and_the_rest_discarded():
    receiver = Receiver(max_body_bytes=10)
    receiver.feed(chunked(b"x" * 8, b"x" * 8, b"x" * 8) + b"0\r\n\r\n" + GET)
    assert (receiver.num_too_large, receiver.requests) == (1, [])


@pytest.mark.parametrize(
    "data",
    [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n"],
)
def test_bytes_that_are_not_http_are_malformed(receiver, data):
    with pytest.raises(MalformedRequest):
        receiver.feed(data)


def test_a_head_without_end_is_malformed(receiver):
    receiver.feed(b"GET / HTTP/1.1\r\n")
    lines = [b"x: " + b"a" * 1000 + b"\r\n"] * (MAX_HEAD_BYTES // 1000 + 2)
    with pytest.raises(MalformedRequest, match="the head of the request is too long"):
        receiver.feed_all(lines)


def test_chunks_with_far_more_framing_than_body_are_malformed(receiver):
    receiver.feed(chunked(b"x"))
    with pytest.raises(MalformedRequest, match="the framing of the request is too long"):
        receiver.feed_all([b"1;" + b"e" * 2000 + b"\r\nx\r\n"] * 100)


def test_a_request_for_another_protocol_is_an_ordinary_one(receiver):
    upgrade = b"GET /ping HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nHost: a\r\n\r\n"
    receiver.feed(upgrade + GET)
    assert [request[1] for request in receiver.requests] == [b"/ping", b"/ping?x=1"]
    with pytest.raises(MalformedRequest, match="another protocol"):
        receiver.feed(upgrade * (MAX_UPGRADES + 1))


def test_connect_is_malformed(receiver):
    with pytest.raises(MalformedRequest):
        receiver.feed(b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n")


def test_a_failing_receiver_is_not_the_clients_fault(receiver):
    receiver.requests = None
    with pytest.raises(httptools.HttpParserCallbackError):
        receiver.feed(GET)


def test_nothing_is_reported_after_discard(receiver):
    receiver.parser.discard()
    receiver.feed(GET + POST)
    assert (receiver.requests, receiver.parser.is_reading) == ([], False)


def test_the_read_in_which_a_request_starts_is_known(receiver):
    receiver.feed(GET[:10])
    assert receiver.parser.fed_bytes == 0
    receiver.feed(GET[10:15])
    assert receiver.parser.fed_bytes == 5


# ---- heads that repeat ----


def repeat(receiver, data):
    """Whether the parser takes these bytes as a repetition."""
    return receiver.parser.repeat(bytearray(data + b"rest of an older read"), len(data))


@pytest.mark.parametrize("request_bytes", [GET, POST])
def test_a_request_with_the_head_of_the_one_before_is_not_parsed_again(receiver, request_bytes):
    receiver.feed(request_bytes)
    assert repeat(receiver, request_bytes)
    assert repeat(receiver, request_bytes)
    assert receiver.requests == [receiver.requests[0]] * 3
    receiver.feed(GET)
    assert receiver.requests[-1] == ("GET", b"/ping?x=1", b"", True)


def test_a_repeated_head_has_its_own_body(receiver):
    receiver.feed(POST)
    assert repeat(receiver, POST.replace(b"hello", b"world"))
    assert [body for _, _, body, _ in receiver.requests] == [b"hello", b"world"]


@pytest.mark.parametrize(
    "following",
    [
        POST[:-1],  # not all of it
        POST + b"G",  # and more
        POST + POST,
        POST.replace(b"/m", b"/n"),
        POST.replace(b"5", b"4"),
        GET,
    ],
)
def test_anything_else_is_parsed(receiver, following):
    receiver.feed(POST)
    assert not repeat(receiver, following)
    assert len(receiver.requests) == 1


def test_a_head_in_the_middle_of_a_body_is_not_a_repetition():
    receiver = Receiver(on_head_from_bytes=1000)
    receiver.feed(POST)
    receiver.feed(POST.replace(b"5", b"%d" % len(POST))[: -len(b"hello")])  # its body is to come
    assert not repeat(receiver, POST)
    receiver.feed(POST)
    assert receiver.requests[-1][2] == POST


@pytest.mark.parametrize(
    "request_bytes",
    [
        chunked(b"hello", b""),
        b"POST /p HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\nx",
        b"POST /p HTTP/1.1\r\ncontent-length: 100\r\n\r\n" + b"x" * 100,  # large, for this receiver
        b"GET /p HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        POST + GET,
    ],
)
def test_only_plain_requests_are_remembered(receiver, request_bytes):
    receiver.feed(request_bytes)
    before = len(receiver.requests)
    assert before
    assert not repeat(receiver, request_bytes)
    receiver.feed(request_bytes)
    assert len(receiver.requests) == 2 * before


@given(st.lists(st.sampled_from([GET, POST, POST.replace(b"hello", b"world"), chunked(b"ab", b"")]), max_size=8))
def test_repetitions_change_no_request(sent):
    parsed, repeated = Receiver(), Receiver()
    for data in sent:
        parsed.feed(data)
        if not repeat(repeated, data):
            repeated.feed(data)
    assert repeated.requests == parsed.requests
