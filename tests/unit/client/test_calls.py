"""Calls of the clients, without a server: settings, bodies, errors, retries, events."""

from __future__ import annotations

import json

import pytest

from flambeau.client import calls
from flambeau.client.calls import ClientSettings, EventReader, StreamReader
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
    assert calls.value_of(HttpReply(200, {"content-type": "application/json"}, b"[1]")) == [1]
    assert calls.value_of(HttpReply(200, {}, b"[1]")) == "[1]"
    assert calls.value_of(HttpReply(200, {}, b"\xff")) == b"\xff"
    assert calls.value_of(HttpReply(200, {"content-type": "image/png"}, b"a")) == b"a"


def test_error_carries_status_message_cause_and_request_id():
    body = json.dumps({"code": 503, "type": "T", "message": "no", "cause": ["Traceback (most", "  x", "KeyError: 'a'"]})
    error = calls.error_of(HttpReply(503, {"x-request-id": "r", "retry-after": "2"}, body.encode()))
    assert isinstance(error, ApiError)
    assert (error.status, error.message, error.kind, error.request_id) == (503, "no", "T", "r")
    assert error.cause.endswith("KeyError: 'a'")
    assert error.retry_after_s == 2
    assert str(error) == "no (HTTP 503): KeyError: 'a'"
    openai = calls.error_of(HttpReply(404, {}, b'{"error": {"message": "gone", "type": "t"}}'))
    assert (openai.message, openai.status) == ("gone", 404)
    assert calls.error_of(HttpReply(502, {}, b"<html>")).message == "<html>"


def test_only_a_server_that_names_a_time_is_asked_again():
    busy = HttpReply(503, {"retry-after": "3"}, b"")
    assert calls.retry_delay_s(busy, attempt=0, retries=1) == 3
    assert calls.retry_delay_s(busy, attempt=1, retries=1) is None
    assert calls.retry_delay_s(HttpReply(503, {}, b""), attempt=0, retries=1) is None  # the handler may have run
    assert calls.retry_delay_s(HttpReply(500, {"retry-after": "3"}, b""), attempt=0, retries=1) is None


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


def test_addresses_of_servers():
    assert str(ServerAddress.parse("http://h")) == "http://h:80"
    assert str(ServerAddress.parse("https://[::1]:8")) == "https://[::1]:8"
    assert str(ServerAddress.parse("unix:/a/b")) == "unix:/a/b"
