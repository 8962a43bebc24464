"""Transcripts in pieces, while they are generated."""

from __future__ import annotations

import threading

import pytest

np = pytest.importorskip("numpy")

from flambeau.handlers.pretrained.transcript_stream import (  # noqa: E402
    StreamClosed,
    TranscriptStream,
    complete_length,
    complete_segments,
)

EOS, TIMES = 9, 100
WORDS = {1: " one", 2: " two", 3: " th", 4: "ree"}


def decode(tokens):
    return "".join(WORDS.get(token, "") for token in tokens)


def put_window(stream, *tokens):
    for token in ((0,), *((token,) for token in tokens)):  # the prompt first
        stream.put(np.array(token))
    stream.end()


def test_words_are_sent_when_they_are_complete():
    stream = TranscriptStream(decode, [EOS])

    def generate():
        put_window(stream, 1, 2, 3, 4, EOS)
        return decode([1, 2, 3, 4])

    assert [*stream.texts(generate)] == [" one", " two", " three"]


def test_window_is_sent_without_what_is_computed_again():
    stream = TranscriptStream(decode, [EOS], TIMES)

    def generate():
        put_window(stream, TIMES, 1, 101, 101, 2, 2, EOS)
        put_window(stream, TIMES, 2, 1, 102, EOS)
        return " one two one"

    assert "".join(stream.texts(generate)) == " one two one"


@pytest.mark.parametrize(
    ("text", "sent"),
    [(" one tw", " one"), (" one", ""), ("", ""), ("你好", "你好"), ("你\ufffd", "你"), (" 你 ok", " 你")],
)
def test_text_that_is_complete(text, sent):
    assert text[: complete_length(text)] == sent


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([1, 2], [1, 2]),
        ([TIMES, 1, 101], [TIMES, 1, 101]),
        ([TIMES, 1, 101, 101, 2, 102], [TIMES, 1, 101, 101, 2, 102]),
        ([TIMES, 1, 101, 101, 2], [TIMES, 1, 101]),
        ([TIMES, 1, 101, 101], [TIMES, 1, 101]),
        ([], []),
    ],
)
def test_segments_that_whisper_keeps(tokens, kept):
    assert complete_segments(tokens, TIMES) == kept


def test_transcript_that_differs_is_an_error():
    stream = TranscriptStream(decode)

    def generate():
        put_window(stream, 1, 2)
        return " another text"

    with pytest.raises(RuntimeError, match="without stream"):
        [*stream.texts(generate)]


def test_closed_stream_ends_the_generation():
    stream, ended = TranscriptStream(decode), threading.Event()

    def generate():
        try:
            while True:
                put_window(stream, 1, 2)
        except StreamClosed:
            ended.set()
            raise

    texts = stream.texts(generate)
    assert next(texts) == " one"
    texts.close()
    assert ended.wait(60)
