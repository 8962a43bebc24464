"""Requests of /v1/audio: the fields of a form, and what the handler gets."""

from __future__ import annotations

import json

import pytest

from flambeau.errors import BadRequest, InvalidField
from flambeau.frontend.http.bodies import read_form
from flambeau.frontend.openai.audio import (
    TranscriptionRequest,
    TranslationRequest,
    order_of,
    sound_of,
    to_document,
)
from flambeau.frontend.openai.requests import read_object

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
        ([("stream", "true")], "stream"),
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
