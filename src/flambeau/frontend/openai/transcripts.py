"""Transcripts of speech: what a handler returns, and OpenAI's forms of it (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
TIMED = ("srt", "verbose_json", "vtt")  # they need the times of segments
PLAIN = "text/plain; charset=utf-8"
CONTENT_TYPES = {"json": "application/json", "verbose_json": "application/json", "vtt": "text/vtt; charset=utf-8"}


class TranscriptSegment(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a transcript, with times in seconds. What a handler does not know, it leaves out."""

    start: float
    end: float
    text: str
    tokens: list[int] | UnsetType = UNSET
    temperature: float | UnsetType = UNSET
    avg_logprob: float | UnsetType = UNSET
    compression_ratio: float | UnsetType = UNSET
    no_speech_prob: float | UnsetType = UNSET


class TranscriptWord(msgspec.Struct, kw_only=True):
    word: str
    start: float
    end: float


class Transcript(msgspec.Struct, kw_only=True):
    """A handler's reply to a sound, or a piece of it."""

    text: str
    language: str = ""
    duration: float | None = None  # of the sound, in seconds
    segments: list[TranscriptSegment] | None = None
    words: list[TranscriptWord] | None = None


Timed = TypeVar("Timed", TranscriptSegment, TranscriptWord)
_decode = msgspec.json.Decoder(Transcript).decode


def read_transcript(body: bytes) -> Transcript:
    """A handler's reply, or a piece of it. Raises msgspec.DecodeError for one that is none."""
    return _decode(body)


def joined(pieces: Sequence[Transcript], timestamps: Sequence[str]) -> Transcript:
    """One transcript of all pieces. Raises msgspec.DecodeError if it lacks the times that were asked for."""
    if not pieces:
        raise msgspec.ValidationError("it returned nothing")
    whole = Transcript(text="".join(piece.text for piece in pieces))
    for piece in pieces:
        whole.language = piece.language or whole.language
        whole.duration = whole.duration if piece.duration is None else piece.duration
        whole.segments = added(whole.segments, piece.segments)
        whole.words = added(whole.words, piece.words)
    for kind, given in (("segment", whole.segments), ("word", whole.words)):
        if kind in timestamps and given is None:
            raise msgspec.ValidationError(f'"timestamps" has "{kind}", but the reply has no "{kind}s"')
    return whole


def added(before: list[Timed] | None, more: list[Timed] | None) -> list[Timed] | None:
    if before is None or more is None:
        return more if before is None else before
    return before + more


def to_body(found: Transcript, response_format: str, task: str) -> bytes:
    """A transcript in one of OpenAI's formats."""
    if response_format == "text":
        return f"{found.text.strip()}\n".encode()
    if response_format in CUES:
        return CUES[response_format](found.segments or []).encode()
    document: dict[str, Any] = {"text": found.text.strip()}
    if response_format == "verbose_json":
        document = {"task": task, "language": found.language, "duration": found.duration, **document}
        if found.segments is not None:
            document["segments"] = [{"id": i, **msgspec.to_builtins(one)} for i, one in enumerate(found.segments)]
        if found.words is not None:
            document["words"] = found.words
    if found.duration is not None:
        document["usage"] = {"type": "duration", "seconds": math.ceil(found.duration)}
    return msgspec.json.encode(document) + b"\n"


def content_type_of(response_format: str) -> str:
    return CONTENT_TYPES.get(response_format, PLAIN)


def to_srt(segments: Sequence[TranscriptSegment]) -> str:
    cues = (
        f"{i}\n{clock(one.start, ',')} --> {clock(one.end, ',')}\n{line_of(one.text)}\n\n"
        for i, one in enumerate(segments, 1)
    )
    return "".join(cues)


def to_vtt(segments: Sequence[TranscriptSegment]) -> str:
    cues = (f"{clock(one.start, '.')} --> {clock(one.end, '.')}\n{line_of(one.text)}\n\n" for one in segments)
    return "WEBVTT\n\n" + "".join(cues)


CUES: dict[str, Callable[[Sequence[TranscriptSegment]], str]] = {"srt": to_srt, "vtt": to_vtt}


def clock(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    milliseconds = max(0, round(seconds * 1000))
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def line_of(text: str) -> str:
    """One line: an empty line would end the cue, and an arrow would be one of times."""
    return " ".join(text.split()).replace("-->", "->")
