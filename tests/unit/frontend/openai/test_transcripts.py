"""Transcripts in OpenAI's formats."""

from __future__ import annotations

import json

import msgspec
import pytest

from flambeau.frontend.openai.transcripts import content_type_of, joined, read_transcript, to_body

REPLY = {
    "text": " Hello there. Bye.",
    "language": "english",
    "duration": 3661.2,
    "segments": [
        {"start": 0, "end": 1.5, "text": " Hello\n\nthere. -->", "no_speech_prob": 0.25},
        {"start": 3600.0, "end": 3661.0005, "text": " Bye."},
    ],
}


def body_of(response_format, **changes):
    found = joined([read_transcript(json.dumps({**REPLY, **changes}).encode())], ())
    return to_body(found, response_format, "transcribe").decode()


def test_text_and_json():
    assert body_of("text") == "Hello there. Bye.\n"
    assert json.loads(body_of("json")) == {
        "text": "Hello there. Bye.",
        "usage": {"type": "duration", "seconds": 3662},
    }
    assert json.loads(body_of("json", duration=None)) == {"text": "Hello there. Bye."}


def test_verbose_json_has_what_the_handler_knows_and_no_more():
    found = json.loads(body_of("verbose_json"))
    assert {name: found[name] for name in ("task", "language", "duration")} == {
        "task": "transcribe",
        "language": "english",
        "duration": 3661.2,
    }
    assert found["segments"][0] == {
        "id": 0,
        "start": 0.0,
        "end": 1.5,
        "text": " Hello\n\nthere. -->",
        "no_speech_prob": 0.25,
    }
    assert found["segments"][1].keys() == {"id", "start", "end", "text"}
    assert "words" not in found
    words = [{"word": "Hello", "start": 0.0, "end": 0.5}]
    assert json.loads(body_of("verbose_json", words=words, segments=None))["words"] == words


def test_subtitles():
    assert body_of("srt") == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there. ->\n\n2\n01:00:00,000 --> 01:01:01,000\nBye.\n\n"
    )
    assert body_of("vtt").startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello there. ->\n\n01:00:00.000 -->")
    assert content_type_of("vtt").startswith("text/vtt")
    assert content_type_of("srt").startswith("text/plain")
    assert content_type_of("verbose_json") == "application/json"


@pytest.mark.parametrize(
    ("reply", "timestamps"), [({"words": []}, []), ({"text": "a"}, ["word"]), ({"text": "a", "words": []}, ["segment"])]
)
def test_reply_without_what_was_asked_for_is_an_error(reply, timestamps):
    with pytest.raises(msgspec.DecodeError):
        joined([read_transcript(json.dumps(reply).encode())], timestamps)


def test_pieces_are_joined():
    more = {"text": " Again.", "segments": [{"start": 3662, "end": 3663, "text": " Again."}], "duration": 3663}
    found = joined([read_transcript(json.dumps(piece).encode()) for piece in (REPLY, more)], ["segment"])
    assert found.text == " Hello there. Bye. Again."
    assert (found.language, found.duration, len(found.segments), found.words) == ("english", 3663, 3, None)
    with pytest.raises(msgspec.DecodeError):
        joined([], ())
