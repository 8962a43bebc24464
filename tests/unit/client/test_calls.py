"""Calls of the clients, without a server: settings, bodies, errors, retries, events."""

from __future__ import annotations

import fcntl
import json
import resource
import socket
from itertools import chain

import pytest

from flambeau.client import calls
from flambeau.client.client_settings import ClientSettings
from flambeau.client.event_streams import EventReader, StreamReader
from flambeau.client.replies import error_of, retry_delay_s, value_of
from flambeau.client.socket_pool import SocketConnection
from flambeau.client.transport import ResponseParser, ServerAddress
from flambeau.errors import ApiError, ConfigError, NoConnection
from flambeau.http_client import HttpReply


def settings(environment=None, **given):
    wanted = dict.fromkeys(("url", "management_url", "key", "management_key", "key_file"))
    return ClientSettings.read(**wanted | given, timeout_s=1, retries=0, environment=environment or {})


def test_arguments_come_before_the_environment_and_the_environment_before_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings().url == "http://127.0.0.1:8080"
    assert settings().management_url == "http://127.0.0.1:8081"
    assert settings({"FLAMBEAU_URL": "http://a:1"}).url == "http://a:1"
    assert settings({"FLAMBEAU_URL": "http://a:1"}).management_url is None  # asked for
    assert settings({"FLAMBEAU_URL": "http://a:1"}, url="http://b:2").url == "http://b:2"
    assert settings({"FLAMBEAU_KEY": "k"}).keys == {"inference": "k", "management": "k"}
    both = {"FLAMBEAU_INFERENCE_KEY": "i", "FLAMBEAU_MANAGEMENT_KEY": "m"}
    assert settings(both).keys == {"inference": "i", "management": "m"}
    assert settings(both, key="k").keys == {"inference": "k", "management": "k"}
    assert settings(both, key="k", management_key="l").keys == {"inference": "k", "management": "l"}


def test_key_file_of_the_current_folder_is_used_for_this_machine_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key_file.json").write_text(json.dumps({"inference": {"key": "i"}, "API": {"key": "a"}}))
    assert settings().keys == {"inference": "i"}
    assert settings(url="http://elsewhere:80").keys == {}
    assert settings(url="http://elsewhere:80", key_file="key_file.json").keys == {"inference": "i"}
    with pytest.raises(ConfigError, match=r"other\.json cannot be read"):
        settings(key_file="other.json")


def test_invalid_settings_are_refused():
    with pytest.raises(ConfigError, match="not a server's address"):
        settings(url="nonsense")
    with pytest.raises(ConfigError, match="a header cannot carry"):
        settings(key="two\nlines")


def test_bodies_are_sent_by_their_type():
    assert calls.encode(b"x", None) == (b"x", "application/octet-stream")
    assert calls.encode("ü", None) == ("ü".encode(), "text/plain; charset=utf-8")
    assert calls.encode({"a": 1}, None) == (b'{"a": 1}', "application/json")
    assert calls.encode(b"x", "image/png") == (b"x", "image/png")
    with pytest.raises(ConfigError, match="give bytes"):
        calls.encode(object(), None)
    with pytest.raises(ConfigError, match="is sent as JSON"):
        calls.encode([1], "image/png")


def test_replies_are_read_by_their_type():
    assert value_of(HttpReply(200, {"content-type": "application/json"}, b"[1]")) == [1]
    assert value_of(HttpReply(200, {}, b"[1]")) == "[1]"
    assert value_of(HttpReply(200, {}, b"\xff")) == b"\xff"
    assert value_of(HttpReply(200, {"content-type": "image/png"}, b"a")) == b"a"


def test_error_carries_status_message_cause_and_request_id():
    body = json.dumps({"code": 503, "type": "T", "message": "no", "cause": ["Traceback (most", "  x", "KeyError: 'a'"]})
    error = error_of(HttpReply(503, {"x-request-id": "r", "retry-after": "2"}, body.encode()))
    assert isinstance(error, ApiError)
    assert (error.status, error.message, error.kind, error.request_id) == (503, "no", "T", "r")
    assert error.cause.endswith("KeyError: 'a'")
    assert error.retry_after_s == 2
    assert str(error) == "no (HTTP 503): KeyError: 'a'"
    openai = error_of(HttpReply(404, {}, b'{"error": {"message": "gone", "type": "t"}}'))
    assert (openai.message, openai.status) == ("gone", 404)
    assert error_of(HttpReply(502, {}, b"<html>")).message == "<html>"


def test_only_a_server_that_names_a_time_is_asked_again():
    busy = HttpReply(503, {"retry-after": "3"}, b"")
    assert retry_delay_s(busy, attempt=0, retries=1) == 3
    assert retry_delay_s(busy, attempt=1, retries=1) is None
    assert retry_delay_s(HttpReply(503, {}, b""), attempt=0, retries=1) is None  # the handler may have run
    assert retry_delay_s(HttpReply(500, {"retry-after": "3"}, b""), attempt=0, retries=1) is None


def test_management_address_is_the_one_that_the_server_names():
    def found(links):
        return calls.management_url_of(HttpReply(200, {}, json.dumps({"links": links}).encode()), "http://a:1")

    assert found({"management": "http://a:2"}) == "http://a:2"
    assert found({"management": "/models"}) == "http://a:1"
    assert found({}) == "http://a:1"
    assert calls.management_url_of(HttpReply(405, {}, b"x"), "http://a:1") == "http://a:1"
    assert calls.management_url_of(HttpReply(200, {}, b"[" * 100_000), "http://a:1") == "http://a:1"


@pytest.mark.parametrize(
    ("url", "link"),
    [
        ("http://a:1", "http://b:2"),
        ("http://a:1", "http://a@b:2"),
        ("http://a:1", "http://127.0.0.1:2"),
        ("http://127.0.0.1:1", "http://b:2"),
        ("https://a:1", "http://a:2"),
        ("http://a:1", "unix:/run/other"),
        ("http://127.0.0.1:1", "unix:/run/other"),
        ("http://a:1", "nonsense"),
    ],
)
def test_management_key_is_not_sent_to_another_host_that_the_server_names(url, link):
    reply = HttpReply(200, {}, json.dumps({"links": {"management": link}}).encode())
    with pytest.raises(ConfigError, match="pass it as management_url"):
        calls.management_url_of(reply, url)


@pytest.mark.parametrize(
    ("url", "link"),
    [
        ("http://localhost:1", "http://127.0.0.1:2"),
        ("unix:/run/own", "http://127.0.0.1:2"),
        ("http://A:1", "https://a:2"),
        ("http://[::1]:1", "http://localhost:2"),
    ],
)
def test_management_address_may_be_another_port_of_the_same_host(url, link):
    reply = HttpReply(200, {}, json.dumps({"links": {"management": link}}).encode())
    assert calls.management_url_of(reply, url) == link


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_are_read_in_whatever_pieces_they_arrive(size):
    data = b": note\ndata: a\r\n\r\ndata: b\ndata: \n\nevent: end\ndata: {}\n\nevent: empty\n\n"
    reader, found = EventReader(), []
    for start in range(0, len(data), size):
        found += reader.feed(data[start : start + size])
    assert [(event.kind, event.data) for event in found] == [("message", "a"), ("message", "b\n"), ("end", "{}")]


def test_error_event_is_raised_and_bytes_are_decoded():
    reader = StreamReader(HttpReply(200, {"content-type": "text/event-stream", "x-request-id": "r"}, b""))
    assert [*reader.parts(b"data: a\n\nevent: base64\ndata: /w==\n\n")] == ["a", b"\xff"]
    with pytest.raises(ApiError) as caught:
        list(reader.parts(b'event: error\ndata: {"error": {"code": 507, "type": "T", "message": "full"}}\n\n'))
    assert (caught.value.status, caught.value.request_id) == (507, "r")


def test_half_a_response_is_no_response():
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab")
    assert (parser.status, parser.take(), parser.is_complete) == (200, b"ab", False)
    with pytest.raises(NoConnection, match="before the end"):
        parser.feed(b"")
    with pytest.raises(NoConnection, match="not HTTP"):
        ResponseParser().feed(b"SSH-2.0-x\r\n")


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"{no", b"\xff", b"[" * 100_000, b"[]", b"7", b'{"a": 1}', b"9" * 5000]
)
def test_unexpected_answer_is_an_error_of_the_client_with_status_and_beginning(body):
    reply = HttpReply(200, {"content-type": "application/json", "x-request-id": "r"}, body)
    wanted = [
        calls.chat("hi", None, {}),
        calls.scaling("m", None, 1, True),
        calls.management("GET", "/", calls.page_of),
    ]
    for call in wanted:
        with pytest.raises(ApiError, match="is not what this call expects") as caught:
            call.result(reply)
        assert (caught.value.status, caught.value.request_id) == (200, "r")
        assert repr(body[:5].decode("utf-8", "replace"))[1:-1] in caught.value.message
        assert len(caught.value.message) < 1000
    for status in (500, 503):
        assert error_of(HttpReply(status, {}, body)).status == status


@pytest.mark.parametrize(
    "data", [b"data: {no\n\n", b"data: " + b"[" * 100_000 + b"\n\n", b"data: []\n\n", b"data: 7\n\n"]
)
def test_unexpected_event_is_an_error_of_the_client(data):
    head = HttpReply(200, {"content-type": "text/event-stream"}, b"")
    with pytest.raises(ApiError, match="is not what this call expects"):
        list(StreamReader(head).texts(data, calls.chat_text))


def test_bytes_of_an_event_that_are_not_base64_are_an_error_of_the_client():
    reader = StreamReader(HttpReply(200, {"content-type": "text/event-stream"}, b""))
    with pytest.raises(ApiError, match="is not what this call expects"):
        list(reader.parts(b"event: base64\ndata: /\n\n"))


def test_redirect_is_an_error_that_names_status_and_location():
    with pytest.raises(ApiError, match=r"redirects to 'http://b/'.*\(HTTP 307\)") as caught:
        calls.check(HttpReply(307, {"location": "http://b/"}, b""))
    assert caught.value.status == 307
    with pytest.raises(ApiError, match=r"\(HTTP 304\)"):
        calls.check(HttpReply(304, {}, b""))


def test_answer_of_more_bytes_than_the_limit_is_an_error():
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    parser = ResponseParser(max_bytes=10)
    parser.feed(head + b"8\r\n12345678\r\n")
    assert parser.take() == b"12345678"  # one that reads a stream may read without end
    parser.feed(b"8\r\n12345678\r\n")
    with pytest.raises(ApiError, match="more than 10 bytes; raise max_response_bytes"):
        parser.feed(b"8\r\n12345678\r\n")
    announced = ResponseParser(max_bytes=10)
    announced.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n")
    with pytest.raises(ApiError, match="more than 10 bytes"):
        announced.check_head()
    endless = ResponseParser()
    endless.feed(b"HTTP/1.1 200 OK\r\n" + (b"x-a: " + b"a" * 60_000 + b"\r\n") * 17)
    with pytest.raises(NoConnection, match="head of the server's answer has more than"):
        endless.feed(b"x-a: " + b"a" * 60_000 + b"\r\n")
    with pytest.raises(ConfigError, match="max_response_bytes is 0"):
        settings(max_response_bytes=0)


@pytest.mark.parametrize("piece", [b"data: 1234\n", b"data: 1234", b"12345678"])
def test_event_of_more_bytes_than_the_limit_is_an_error(piece):
    reader = EventReader(max_bytes=100)
    for _ in range(50):  # events that end, and comments, may come without end
        assert len([*reader.feed(b": comment of many characters\ndata: 1234\n\n")]) == 1
    with pytest.raises(ApiError, match="more than 100 bytes"):
        [*chain.from_iterable(reader.feed(piece) for _ in range(20))]


def test_answer_that_switches_protocols_unasked_is_an_error():
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n")
    assert not parser.has_head
    parser.feed(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nabc")
    with pytest.raises(ApiError, match=r"changed the protocol.*\(HTTP 101\)"):
        parser.check_head()


def test_addresses_of_servers():
    assert str(ServerAddress.parse("http://h")) == "http://h:80"
    assert str(ServerAddress.parse("https://[::1]:8")) == "https://[::1]:8"
    assert str(ServerAddress.parse("unix:/a/b")) == "unix:/a/b"


def test_connections_are_kept_in_a_program_with_many_open_files():
    """`select` takes descriptors below 1024 only."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    one, other = socket.socketpair()
    try:
        high = socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1500))
        connection = object.__new__(SocketConnection)
        connection._socket = high
        assert not connection.is_stale
        other.close()
        assert connection.is_stale
        high.close()
    finally:
        one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
