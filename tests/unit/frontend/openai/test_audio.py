"""Requests of /v1/audio: the fields of a form, and what the handler gets."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from flambeau.config.server import ErrorStyle
from flambeau.errors import BadRequest, InvalidField, JobFailed
from flambeau.frontend.http.bodies import read_form
from flambeau.frontend.openai.audio import (
    TranscriptionRequest,
    TranscriptReply,
    TranslationRequest,
    order_of,
    sound_of,
    to_document,
)
from flambeau.frontend.openai.requests import read_object
from flambeau.wire.messages import Part
from support.http_exchanges import FakeConnection, new_exchange

SOUND = b"RIFF"


def form_of(*fields, file=SOUND):
    parts = [f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields]
    body = "".join(parts).encode()
    if file is not None:
        head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        body += head + file + b"\r\n"
    return read_form("multipart/form-data; boundary=x", body + b"--x--\r\n")


def read(*fields, kind=TranscriptionRequest):
    return read_object(to_document(form_of(*fields)), kind)


def test_fields_become_an_order_for_the_handler():
    request = read(("model", "m"), ("language", "de"), ("temperature", "0.5"), ("prompt", "Ada"), ("stream", "false"))
    assert json.loads(order_of(request, "transcribe")) == {
        "task": "transcribe",
        "timestamps": [],
        "language": "de",
        "temperature": 0.5,
        "prompt": "Ada",
    }
    assert sound_of(form_of(("model", "m"))) == SOUND


def test_handler_of_a_streamed_transcript_is_asked_for_a_stream():
    for written, is_streamed in (("true", True), ("True", True), ("false", False)):
        order = json.loads(order_of(read(("stream", written)), "transcribe"))
        assert order.get("stream", False) is is_streamed


@pytest.mark.parametrize(
    ("fields", "timestamps"),
    [
        ([], []),
        ([("response_format", "text")], []),
        ([("response_format", "srt")], ["segment"]),
        ([("response_format", "verbose_json")], ["segment"]),
        ([("response_format", "verbose_json"), ("timestamp_granularities[]", "word")], ["word"]),
        (
            [
                ("response_format", "verbose_json"),
                ("timestamp_granularities[]", "word"),
                ("timestamp_granularities[]", "segment"),
            ],
            ["segment", "word"],
        ),
    ],
)
def test_times_that_the_handler_must_return(fields, timestamps):
    assert json.loads(order_of(read(*fields), "transcribe"))["timestamps"] == timestamps


def test_translation_has_fewer_fields():
    request = read(("response_format", "vtt"), kind=TranslationRequest)
    assert json.loads(order_of(request, "translate")) == {"task": "translate", "timestamps": ["segment"]}
    with pytest.raises(InvalidField, match="language"):
        read(("language", "de"), kind=TranslationRequest)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ([("response_format", "diarized_json")], "response_format"),
        ([("temperature", "warm")], "temperature"),
        ([("temperature", "nan")], "temperature"),
        ([("temperature", "2")], "temperature"),
        ([("language", "de"), ("language", "en")], "language"),
        ([("stream", "yes")], "stream"),
        ([("stream", "true"), ("response_format", "srt")], "stream"),
        ([("include[]", "logprobs")], "include"),
        ([("chunking_strategy", "auto")], "chunking_strategy"),
        ([("timestamp_granularities[]", "word")], "timestamp_granularities"),
        ([("response_format", "verbose_json"), ("timestamp_granularities[]", "day")], "timestamp_granularities[0]"),
        ([("langage", "de")], "langage"),
        ([("prompt", "a" * 10_001)], "prompt"),
    ],
)
def test_invalid_fields_are_named(fields, param):
    with pytest.raises(InvalidField) as caught:
        order_of(read(*fields), "transcribe")
    assert caught.value.field == param


def test_form_needs_one_sound():
    for file in (None, b""):
        with pytest.raises(InvalidField, match="file"):
            sound_of(form_of(file=file))
    two = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nb\r\n' * 2 + b"--x--\r\n"
    with pytest.raises(BadRequest, match="two files"):
        read_form("multipart/form-data; boundary=x", two)
    with pytest.raises(BadRequest, match="multipart"):
        read_form("application/json", b"{}")


def reply_of(*fields):
    connection = FakeConnection()
    model = SimpleNamespace(name="m", answers=Counter(), count_broken=Mock())
    exchange = new_exchange(connection, "POST", "/v1/audio/transcriptions", version="1.0")
    return TranscriptReply(exchange, model, ErrorStyle(), read(*fields), "transcribe"), connection


def piece(text, *, last=False):
    return Part(1, json.dumps({"text": text}).encode(), last=last)


def events_of(connection):
    return [json.loads(event.removeprefix("data: ")) for event in connection.body.decode().strip().split("\n\n")]


def test_pieces_are_events_of_a_stream():
    reply, connection = reply_of(("stream", "true"))
    reply.on_parts([piece(" "), piece(" Hello")])
    assert events_of(connection) == [{"type": "transcript.text.delta", "delta": "Hello"}]
    reply.on_parts([piece(" there. "), Part(1, b"")])
    *_, delta, done = events_of(connection)
    assert delta["delta"] == " there. "
    assert done == {"type": "transcript.text.done", "text": "Hello there."}
    assert connection.events[-1] == "finished"


def test_whole_transcript_is_a_stream_of_one_piece():
    reply, connection = reply_of(("stream", "true"))
    reply.on_parts([piece("Hello", last=True)])
    assert [event["type"] for event in events_of(connection)] == ["transcript.text.delta", "transcript.text.done"]


def test_pieces_are_joined_without_a_stream():
    reply, connection = reply_of(("response_format", "text"))
    reply.on_parts([piece("Hello ")])
    assert not connection.sent
    reply.on_parts([piece("there.", last=True)])
    assert connection.body == b"Hello there.\n"


def test_failed_stream_ends_with_an_error():
    reply, connection = reply_of(("stream", "true"))
    reply.on_parts([piece("Hello")])
    reply.on_error(JobFailed("it fell", status=503))
    assert "it fell" in events_of(connection)[-1]["error"]["message"]
    reply, connection = reply_of(("stream", "true"))
    reply.on_parts([Part(1, b"Hello", last=False)])
    assert connection.status == 500
