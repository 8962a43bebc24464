"""Bodies that clients send compressed."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

import pytest

from flambeau.config.server import ErrorStyle
from flambeau.errors import InvalidKey
from flambeau.frontend.http.bodies import bytes_of
from flambeau.frontend.http.compressed_bodies import MAX_MEMBERS
from flambeau.frontend.http.router import ANYTHING, Router, unknown_path
from flambeau.serving.job import RequestBody
from support.http_exchanges import FakeConnection, new_exchange

TEXT = b'{"text": "hello"}'


def repeat(exchange, segments):
    exchange.respond(200, bytes_of(exchange), exchange.headers)


class Guarded:
    def __call__(self, exchange, segments):
        exchange.respond(200, b"")

    def check(self, exchange, segments):
        raise InvalidKey("no key")


async def answer(body, encoding, *, path="/a", content_type="application/json", **options):
    connection = FakeConnection()
    given = [("content-type", content_type), ("content-encoding", encoding), ("content-length", str(len(body)))]
    exchange = new_exchange(connection, "POST", path, headers=given)
    exchange.content_encoding, exchange.body = encoding, RequestBody(body)
    routes = {"a": repeat, "v2": repeat, "guarded": Guarded(), ANYTHING: unknown_path}
    Router(routes, style=ErrorStyle(), **{"max_body_bytes": 1000, **options}).handle(exchange)
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    return connection


def raw_deflate(content):
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(content) + packer.flush()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", gzip.compress(TEXT, mtime=0)),
        (" X-GZIP ", gzip.compress(TEXT, mtime=0)),
        ("gzip", gzip.compress(TEXT[:5], mtime=0) + gzip.compress(TEXT[5:], mtime=0)),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", raw_deflate(TEXT)),
        ("identity", TEXT),
    ],
)
async def test_a_compressed_body_is_read_as_what_was_compressed(encoding, body):
    connection = await answer(body, encoding)
    assert (connection.status, connection.body) == (200, TEXT)


async def test_a_handler_sees_the_headers_of_the_decompressed_body():
    connection = await answer(gzip.compress(TEXT, mtime=0), "gzip", content_type="text/plain")
    head = connection.sent.partition(b"\r\n\r\n")[0].lower()
    assert b"content-type: text/plain" in head
    assert b"content-encoding" not in head


async def test_an_empty_member_is_an_empty_body():
    assert (await answer(gzip.compress(b"", mtime=0), "gzip")).body == b""


@pytest.mark.parametrize(
    ("encoding", "body", "status", "text"),
    [
        ("br", b"x", 415, "'br' is not supported; gzip and deflate are"),
        ("gzip, deflate", b"x", 415, "'gzip, deflate' is not supported"),
        ("gzip", TEXT, 400, "not gzip, which its content-encoding names"),
        ("gzip", gzip.compress(TEXT, mtime=0)[:-3], 400, "incomplete"),
        ("gzip", gzip.compress(TEXT, mtime=0) + b"more", 400, "not gzip"),
        ("gzip", gzip.compress(bytes(1001), mtime=0), 413, "larger than 1000 bytes when it is decompressed"),
        ("deflate", raw_deflate(bytes(1001)), 413, "larger than 1000 bytes"),
        ("gzip", gzip.compress(b"", mtime=0) * (MAX_MEMBERS + 1), 400, "members"),
    ],
)
async def test_a_body_that_cannot_be_decompressed_is_refused_by_name(encoding, body, status, text):
    connection = await answer(body, encoding)
    document = json.loads(connection.body)
    assert (connection.status, document["code"]) == (status, status)
    assert text in document["message"]
    assert (b"accept-encoding: gzip, deflate" in connection.sent) == (status == 415)


async def test_a_body_of_the_largest_size_is_taken():
    assert (await answer(gzip.compress(bytes(1000), mtime=0), "gzip")).body == bytes(1000)


async def test_nothing_is_decompressed_for_a_sender_without_a_key():
    connection = await answer(b"no gzip", "gzip", path="/guarded", has_keys=True)
    assert "no key" in json.loads(connection.body)["message"]


@pytest.mark.parametrize(
    ("path", "content_type", "is_decoded"),
    [("/a", "application/json", True), ("/a", "image/png", False), ("/v2/a", "application/octet-stream", True)],
)
async def test_handlers_made_for_torchserve_get_other_bodies_as_they_were_sent(path, content_type, is_decoded):
    body = gzip.compress(TEXT, mtime=0)
    connection = await answer(body, "gzip", path=path, content_type=content_type, decodes_all=False)
    assert connection.body == (TEXT if is_decoded else body)
