"""Router: paths → endpoints, exceptions → responses."""

from __future__ import annotations

import asyncio
import json

import pytest

from flambeau.config.server import ErrorStyle
from flambeau.errors import BadRequest, InvalidKey, ModelNotFound
from flambeau.frontend.http.router import ANYTHING, Router, query_of, segments_of, unknown_path
from support.http_exchanges import FakeConnection, new_exchange


def respond(exchange, segments):
    exchange.respond(200, "/".join(segments).encode())


def fail(exchange, segments):
    raise ModelNotFound("no such model")


def crash(exchange, segments):
    raise ZeroDivisionError


def start_and_crash(exchange, segments):
    exchange.start(200)
    raise ZeroDivisionError


async def fail_later(exchange, segments):
    await asyncio.sleep(0)
    raise BadRequest("later")


class Guarded:
    def __call__(self, exchange, segments):
        exchange.respond(200, b"")

    def check(self, exchange, segments):
        raise InvalidKey("no key")


ROUTES = {
    "": respond,
    "a": respond,
    "fail": fail,
    "crash": crash,
    "start": start_and_crash,
    "later": fail_later,
    "guarded": Guarded(),
    ANYTHING: unknown_path,
}


def answer(path, **options):
    connection = FakeConnection()
    Router(ROUTES, style=ErrorStyle(), **options).handle(new_exchange(connection, target=path))
    return connection


@pytest.mark.parametrize(
    ("path", "found"), [("/a/b//c/", "a/b//c"), ("/a/b%2Fc", "a/b/c"), ("/a?b=c", "a"), ("/", ""), ("", "")]
)
def test_the_first_segment_chooses_the_endpoint(path, found):
    connection = answer(path)
    assert (connection.status, connection.body) == (200, found.encode())


def test_segments_are_percent_decoded_and_never_empty():
    assert segments_of("/a%20b/c") == ["a b", "c"]
    assert segments_of("") == [""]


def test_of_a_repeated_parameter_the_first_counts():
    exchange = new_exchange(FakeConnection(), target="/a?x=1&x=2&y=")
    assert query_of(exchange) == {"x": "1", "y": ""}


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/fail", 404, "ModelNotFoundException"),
        ("/crash", 500, "InternalServerException"),
        ("/nowhere", 404, "ResourceNotFoundException"),
    ],
)
def test_exceptions_become_responses(path, status, kind):
    connection = answer(path)
    document = json.loads(connection.body)
    assert (connection.status, document["code"], document["type"]) == (status, status, kind)


def test_a_response_that_has_started_is_aborted():
    assert answer("/start").events == [200, "abort"]


async def test_exceptions_of_a_task_become_responses():
    connection = answer("/later")
    [work] = asyncio.all_tasks() - {asyncio.current_task()}
    await work
    assert (connection.status, json.loads(connection.body)["message"]) == (400, "later")


def test_a_large_body_is_admitted_only_with_a_key_where_keys_are_needed():
    exchange = new_exchange(FakeConnection(), target="/guarded")
    Router(ROUTES, style=ErrorStyle()).admit(exchange)
    with pytest.raises(InvalidKey):
        Router(ROUTES, style=ErrorStyle(), has_keys=True).admit(exchange)
    with pytest.raises(BadRequest):
        Router(ROUTES, style=ErrorStyle(), has_keys=True).admit(new_exchange(FakeConnection(), target="/a"))


@pytest.mark.parametrize(
    ("path", "field"), [("/predictions/m", "message"), ("/v1/chat/completions", "error"), ("/v2/models/m", "error")]
)
def test_each_api_has_its_own_format_of_errors(path, field):
    connection = FakeConnection()
    Router(ROUTES, style=ErrorStyle()).too_large(new_exchange(connection, target=path), 10)
    assert connection.status == 413
    assert field in json.loads(connection.body)
