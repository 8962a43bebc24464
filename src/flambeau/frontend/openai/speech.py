"""POST /v1/audio/speech: text → sound, by a handler that speaks."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flambeau.config.server import ErrorStyle
from flambeau.errors import FlambeauError, InvalidField, JobFailed
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.inference import submit
from flambeau.frontend.openai.event_replies import EventReply, to_event
from flambeau.frontend.openai.fields import OBJECT, TEXT, either, number, one_of, text
from flambeau.frontend.openai.models import check_envelope, choose_model
from flambeau.frontend.openai.requests import ModelRequest, optional, read_request, registered, required
from flambeau.frontend.openai.sounds import (
    CONTENT_TYPES,
    ENCODED,
    InvalidSound,
    Sound,
    SoundEncoder,
    check_format,
    check_next,
    check_pcm,
    read_wav,
    wav_file,
    wav_head,
)
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Part

MAX_INPUT = 4096  # characters, as in OpenAI's API
MAX_ENCODED_BYTES = 256 << 20  # of a sound that is kept until it is complete
FORMATS = ("mp3", "opus", "flac", "wav", "pcm")
EXPECTED = "speaks: it must return the bytes of a WAV file, or a generator of such files"


def _limited(value: str, place: str) -> str:
    if len(value) > MAX_INPUT:
        raise InvalidField(
            place, f"{place} has {len(value)} characters; send at most {MAX_INPUT}, and long texts in parts"
        )
    return value


def _name_of(value: Any, place: str) -> str:
    if isinstance(value, str):
        return value
    found = value.get("id")
    if not isinstance(found, str) or len(value) > 1:
        raise InvalidField(place, f'{place} must be a name, or an object with nothing but an id: {{"id": "…"}}')
    return found


@registered
@dataclass(slots=True, kw_only=True)
class SpeechRequest(ModelRequest):
    """`POST /v1/audio/speech`."""

    input: str = required(text(1).then(_limited).described("The text to speak."))
    voice: str | None = optional(either(TEXT, OBJECT).then(_name_of).described("A voice that the handler knows."))
    instructions: str | None = optional(TEXT.then(_limited).described("How to speak, in words."))
    speed: float | None = optional(number(0.25, 4))
    response_format: str | None = optional(one_of(*FORMATS))
    stream_format: str | None = optional(one_of("audio", "sse"))


def create_speech(server: Server, exchange: Exchange, encoder: SoundEncoder) -> None:
    request = read_request(take_bytes(exchange), SpeechRequest)
    model, version = choose_model(server.registry, request.model, "speak")
    check_envelope(model)
    check_format(request.response_format or FORMATS[0])
    reply, order = SpeechReply(exchange, model, server.config.error_style, request, encoder), order_of(request)
    job = Job(
        reply,
        request_id=exchange.request_id,
        headers=exchange.headers,
        body=RequestBody(order),
        arrived=exchange.arrived,
        fields=[("speech", len(order))],
    )
    submit(reply, job, version)


def order_of(request: SpeechRequest) -> bytes:
    """What the handler is to say, as JSON; fields that are not given are absent."""
    names = ("input", "voice", "instructions", "speed")
    return msgspec.json.encode({name: value for name in names if (value := getattr(request, name)) is not None})


class SpeechReply(EventReply):
    """Writes a handler's WAV files to its exchange as one sound: in parts, or whole if it is encoded."""

    __slots__ = ("_encoder", "_first", "_format", "_kept", "_num_kept")

    def __init__(
        self, exchange: Exchange, model: Model, style: ErrorStyle, request: SpeechRequest, encoder: SoundEncoder
    ) -> None:
        super().__init__(exchange, model, style, is_streamed=request.stream_format == "sse")
        self._format, self._encoder = request.response_format or FORMATS[0], encoder
        self._first: Sound | None = None
        self._kept: list[Sound] = []
        self._num_kept = 0  # bytes

    def on_parts(self, parts: list[Part]) -> None:
        if parts[0].status >= 400 and self._first is None:
            self.reject(JobFailed(parts[0].body.decode("utf-8", "replace"), status=parts[0].status))
            return
        try:
            sounds = [self._checked(read_wav(part.body)) for part in parts if part.body]
            if self._first is None and parts[-1].last:
                raise InvalidSound("it returned nothing")
        except InvalidSound as error:
            text = f"The handler of {self.model.name!r} did not answer as one that {EXPECTED} ({error})."
            self.reject(JobFailed(text, status=500))
        except InvalidField as error:
            self.reject(error)
        else:
            self._take(sounds, ends=parts[-1].last)

    def _checked(self, sound: Sound) -> Sound:
        if self._first is None:
            if self._format == "pcm":
                check_pcm(sound, self.model.name)
            self._first = sound
        check_next(self._first, sound)
        return sound

    def _take(self, sounds: Sequence[Sound], *, ends: bool) -> None:
        if self._format not in ENCODED:
            self._write(sounds, ends=ends)
            return
        self._kept += sounds
        self._num_kept += sum(len(sound.data) for sound in sounds)
        if self._num_kept > MAX_ENCODED_BYTES:
            text = f"the sound is too long for {self._format}: more than {MAX_ENCODED_BYTES >> 20} MB; ask for wav"
            self.reject(JobFailed(text, status=500))
        elif ends:
            self.exchange.run(self._encode())

    async def _encode(self) -> None:
        try:
            self._send([await self._encoder.encode(wav_file(self._kept), self._format)], ends=True)
        except FlambeauError as error:
            self.on_error(error)

    def _write(self, sounds: Sequence[Sound], *, ends: bool) -> None:
        chunks = [sound.data for sound in sounds]
        if self._format == "wav" and not self.exchange.is_started and sounds:
            chunks.insert(0, wav_head(sounds[0].form, sum(map(len, chunks)) if ends else None))
        self._send(chunks, ends=ends)

    def _send(self, chunks: Sequence[bytes], *, ends: bool) -> None:
        if self.is_streamed:
            events = [delta_event(chunk) for chunk in chunks if chunk]
            self.send_events([*events, DONE] if ends else events, ends=ends)
            return
        headers = [("content-type", CONTENT_TYPES[self._format])]
        if not self.exchange.is_started:
            self.model.answers[200] += 1
            if ends:
                self.exchange.respond(200, b"".join(chunks), headers)
                return
            self.exchange.start(200, headers)
        self.exchange.send(chunks, ends=ends)


def delta_event(chunk: bytes) -> bytes:
    return to_event({"type": "speech.audio.delta", "audio": base64.b64encode(chunk).decode()})


DONE = to_event({"type": "speech.audio.done"})
