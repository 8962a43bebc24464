"""Exchange: the bytes of responses."""

from __future__ import annotations

import asyncio
import re

import pytest

from flambeau.frontend.http.exchange import is_request_id, new_request_id, target_of
from flambeau.serving.job import RequestBody
from support.http_exchanges import FakeConnection, new_exchange


@pytest.fixture
def connection():
    return FakeConnection()


def test_a_whole_response_has_its_length_and_the_common_headers(connection):
    new_exchange(connection).respond(200, b"hello", [("content-type", "text/plain")])
    head, _, body = connection.sent.partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"HTTP/1.1 200 OK",
        b"x-request-id: r1",
        b"common: yes",
        b"content-type: text/plain",
        b"connection: keep-alive",
        b"content-length: 5",
    ]
    assert (body, connection.events) == (b"hello", [200, "finished"])


def test_a_response_to_head_has_the_length_but_no_body(connection):
    new_exchange(connection, "HEAD").respond(200, b"hello")
    assert connection.sent.endswith(b"content-length: 5\r\n\r\n")


def test_headers_and_phrases_of_a_handler_cannot_inject_lines(connection):
    new_exchange(connection).respond(299, b"", [("x", "a\r\nset-cookie: b")], "Fine\r\nx: y")
    assert b"HTTP/1.1 299 Fine  x: y\r\n" in connection.sent
    assert b"x: a  set-cookie: b\r\n" in connection.sent


def test_framing_headers_of_a_handler_are_dropped(connection):
    new_exchange(connection).respond(200, b"ab", [("Content-Length", "99"), ("Connection", "close")])
    assert connection.sent.count(b"ontent-length") == 1
    assert b"connection: keep-alive" in connection.sent


def test_a_stream_is_chunked_and_empty_chunks_are_left_out(connection):
    exchange = new_exchange(connection)
    exchange.start(200)
    exchange.send([b"ab", b""])
    exchange.send([b"c"], ends=True)
    assert connection.sent.endswith(b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
    assert connection.events == [200, "finished"]


def test_a_stream_to_an_http_1_0_client_ends_with_the_connection(connection):
    exchange = new_exchange(connection, version="1.0")
    exchange.start(200)
    exchange.send([b"ab"], ends=True)
    assert connection.sent.endswith(b"connection: close\r\n\r\nab")
    assert not exchange.keeps_alive


def test_responses_of_a_draining_server_close_the_connection():
    connection = FakeConnection(is_draining=True)
    new_exchange(connection).respond(200, b"")
    assert b"connection: close" in connection.sent


def test_headers_are_found_in_any_case(connection):
    exchange = new_exchange(connection, headers=[("Content-TYPE", "a"), ("content-type", "b")])
    assert (exchange.header("content-type"), exchange.header("accept")) == ("a", None)


def test_a_dropped_exchange_cancels_its_work_and_releases_its_body(connection):
    exchange, gone = new_exchange(connection), []
    exchange.on_gone = lambda: gone.append(True)
    exchange.body = RequestBody(b"x")
    exchange.drop()
    assert (gone, exchange.body, exchange.on_gone) == ([True], None, None)


async def test_work_of_a_disconnected_client_is_cancelled(connection):
    exchange = new_exchange(connection)
    exchange.run(asyncio.Event().wait())
    [work] = asyncio.all_tasks() - {asyncio.current_task()}
    exchange.drop()
    await asyncio.wait([work])
    assert work.cancelled()


def test_an_absolute_url_loses_its_scheme_and_host():
    assert target_of(b"http://a:80/b?c") == "/b?c"
    assert target_of(b"/b://c") == "/b://c"


def test_request_ids_are_uuids_and_those_of_clients_must_be_printable():
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-a[0-9a-f]{3}-[0-9a-f]{12}", new_request_id())
    assert is_request_id("my-id 1")
    assert not is_request_id("a\n")
    assert not is_request_id("x" * 129)
