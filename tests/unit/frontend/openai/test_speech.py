"""Requests for speech → a handler's body, and its sounds → responses."""

from __future__ import annotations

import base64
import json
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from flambeau.config.server import ErrorStyle
from flambeau.errors import JobFailed
from flambeau.frontend.openai.requests import read_request
from flambeau.frontend.openai.sounds import read_wav, wav_head
from flambeau.frontend.openai.speech import SpeechReply, SpeechRequest, order_of
from flambeau.wire.messages import Part
from support.fake_workers import until
from support.http_exchanges import FakeConnection, new_exchange
from support.openai_requests import refusal
from support.wav_files import wav_of


def read(**fields):
    return read_request(json.dumps({"model": "m", "input": "Hi", **fields}).encode(), SpeechRequest)


def test_handler_gets_what_was_given():
    assert json.loads(order_of(read())) == {"input": "Hi"}
    asked = {"voice": "v", "speed": 1.5, "instructions": "softly"}
    assert json.loads(order_of(read(**asked, response_format="pcm"))) == {"input": "Hi", **asked}
    assert json.loads(order_of(read(voice={"id": "v"})))["voice"] == "v"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", ""),
        ("input", "a" * 4097),
        ("voice", {"name": "v"}),
        ("speed", 0.1),
        ("response_format", "aac"),
        ("stream_format", "hls"),
        ("pitch", 1),
    ],
)
def test_invalid_fields_are_named(field, value):
    assert refusal(read, **{field: value})[0] == field


def reply_of(encoder=None, **fields):
    connection = FakeConnection()
    exchange = new_exchange(connection, "POST", "/v1/audio/speech", version="1.0")
    model = SimpleNamespace(name="m", answers=Counter(), count_broken=Mock())
    request = read(**{"response_format": "wav", **fields})
    return SpeechReply(exchange, model, ErrorStyle(), request, encoder), connection


def part(data, *, last=False, **options):
    return Part(1, wav_of(data, **options), last=last)


def test_one_file_has_its_length():
    reply, connection = reply_of()
    reply.on_parts([part(b"abcd", last=True)])
    assert connection.body == wav_of(b"abcd")
    assert b"content-type: audio/wav\r\n" in connection.sent


def test_several_files_are_one_stream():
    reply, connection = reply_of()
    reply.on_parts([part(b"abcd")])
    assert connection.body == wav_head(read_wav(wav_of()).form, None) + b"abcd"
    reply.on_parts([part(b"ef"), Part(1, b"")])
    assert connection.body.endswith(b"abcdef")
    assert connection.events == [200, "finished"]


def test_samples_alone():
    reply, connection = reply_of(response_format="pcm")
    reply.on_parts([part(b"abcd", last=True)])
    assert connection.body == b"abcd"
    reply, connection = reply_of(response_format="pcm")
    reply.on_parts([part(b"abcd", last=True, rate=16_000)])
    assert connection.status == 400


def test_events_hold_the_sound():
    reply, connection = reply_of(response_format="pcm", stream_format="sse")
    reply.on_parts([part(b"abcd")])
    reply.on_parts([part(b"ef"), Part(1, b"")])
    events = [json.loads(line.removeprefix("data: ")) for line in connection.body.decode().strip().split("\n\n")]
    assert [event["type"] for event in events] == ["speech.audio.delta", "speech.audio.delta", "speech.audio.done"]
    assert b"".join(base64.b64decode(event.get("audio", "")) for event in events) == b"abcdef"


@pytest.mark.parametrize(
    "parts", [[Part(1, b"no sound")], [Part(1, b"")], [part(b"ab"), part(b"ab", rate=8000, last=True)]]
)
def test_handler_that_does_not_speak_is_named(parts):
    reply, connection = reply_of()
    reply.on_parts(parts)
    assert connection.status == 500
    assert "WAV" in json.loads(connection.body)["error"]["message"]


def test_sound_that_breaks_off_is_aborted():
    reply, connection = reply_of()
    reply.on_parts([part(b"ab")])
    reply.on_parts([Part(1, b"no sound")])
    assert connection.events == [200, "abort"]


def test_status_of_the_handler_is_kept():
    reply, connection = reply_of()
    reply.on_parts([Part(1, b"no such voice", status=404)])
    assert connection.status == 404


class Encoder:
    async def encode(self, file, name):
        if name == "opus":
            raise JobFailed("it fell", status=500)
        return name.encode() + file


async def test_whole_sound_is_encoded():
    reply, connection = reply_of(Encoder(), response_format="mp3")
    reply.on_parts([part(b"abcd")])
    assert not connection.sent
    reply.on_parts([part(b"ef"), Part(1, b"")])
    await until(lambda: connection.sent)
    assert connection.body == b"mp3" + wav_of(b"abcdef")
    assert b"content-type: audio/mpeg\r\n" in connection.sent


async def test_failed_encoder_is_answered():
    reply, connection = reply_of(Encoder(), response_format="opus")
    reply.on_parts([part(b"abcd", last=True)])
    await until(lambda: connection.sent)
    assert connection.status == 500
