"""AudioApi: the paths below /v1/audio. Transcriptions and translations, by a handler that transcribes."""

# ruff: noqa: RUF009  (the defaults are dataclass fields that carry their FieldType)

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from flambeau.config.server import ErrorStyle
from flambeau.errors import InvalidField, JobFailed
from flambeau.frontend.http.bodies import UploadForm, read_form, take_bytes
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.inference import submit
from flambeau.frontend.http.openapi import OPENAI_ERROR, Operation, Schema
from flambeau.frontend.openai.api import STATUSES, operation
from flambeau.frontend.openai.errors import not_allowed, not_found
from flambeau.frontend.openai.event_replies import EventReply, to_event
from flambeau.frontend.openai.fields import TEXT, array, number, one_of, text
from flambeau.frontend.openai.models import check_envelope, choose_model
from flambeau.frontend.openai.requests import (
    ModelRequest,
    optional,
    read_object,
    registered,
    request_schema,
    unsupported,
)
from flambeau.frontend.openai.sounds import SoundEncoder
from flambeau.frontend.openai.speech import SpeechRequest, create_speech
from flambeau.frontend.openai.transcripts import (
    FORMATS,
    TIMED,
    Transcript,
    content_type_of,
    joined,
    read_transcript,
    to_body,
)
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import Part

MAX_PROMPT = 10_000  # characters; models read a few hundred tokens
GRANULARITIES = ("segment", "word")
LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")
NUMBERS = ("temperature",)
EXPECTED = (
    'transcribes: it must return {"text": ...}, or a generator of such pieces, and for what "timestamps" asks for '
    '"segments" or "words" with their start and end'
)


def _limited(value: str, place: str) -> str:
    if len(value) > MAX_PROMPT:
        raise InvalidField(place, f"{place} has {len(value)} characters; send at most {MAX_PROMPT}")
    return value


STREAM = replace(
    one_of("true", "false", "True", "False").then(lambda value, place: value.lower() == "true"),
    schema={"type": "boolean", "description": "Answer with server-sent events."},
)


@registered
@dataclass(slots=True, kw_only=True)
class TranslationRequest(ModelRequest):
    """`POST /v1/audio/translations`: the fields beside the file."""

    prompt: str | None = optional(TEXT.then(_limited).described("Text before the sound, for names and style."))
    response_format: str | None = optional(one_of(*FORMATS))
    temperature: float | None = optional(number(0, 1))

    @property
    def timestamps(self) -> Sequence[str]:
        """The times that the handler must return."""
        return ("segment",) if self.response_format in TIMED else ()

    @property
    def is_streamed(self) -> bool:
        return False


@registered
@dataclass(slots=True, kw_only=True)
class TranscriptionRequest(TranslationRequest):
    """`POST /v1/audio/transcriptions`."""

    language: str | None = optional(text(1).described("The language of the sound, as an ISO 639-1 code."))
    timestamp_granularities: list[str] | None = optional(array(one_of(*GRANULARITIES)))
    stream: bool | None = optional(STREAM)
    include: Any = unsupported("log-probabilities of transcripts are not made")
    chunking_strategy: Any = unsupported("leave it out; long sounds are read part by part")
    known_speaker_names: Any = unsupported("speakers are not told apart")
    known_speaker_references: Any = unsupported("speakers are not told apart")

    @property
    def timestamps(self) -> Sequence[str]:
        asked = self.timestamp_granularities
        if not asked:
            return ("segment",) if self.response_format in TIMED else ()
        if self.response_format != "verbose_json":
            raise InvalidField("timestamp_granularities", "timestamp_granularities needs response_format verbose_json")
        return [kind for kind in GRANULARITIES if kind in asked]

    @property
    def is_streamed(self) -> bool:
        if self.stream and self.response_format in TIMED:
            raise InvalidField("stream", f"stream needs response_format json or text, not {self.response_format}")
        return bool(self.stream)


TASKS: Mapping[str, tuple[str, type[TranslationRequest]]] = {
    "transcriptions": ("transcribe", TranscriptionRequest),
    "translations": ("translate", TranslationRequest),
}


class AudioApi:
    """OpenAI's paths below /v1/audio."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._encoder = SoundEncoder()

    def v1(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        if len(segments) != 3 or segments[2] not in (*TASKS, "speech"):
            not_found(exchange)
        elif exchange.method == "OPTIONS":
            exchange.respond(200, b"")  # every response has the CORS headers
        elif exchange.method != "POST":
            not_allowed(exchange, "POST")
        elif segments[2] == "speech":
            create_speech(self._server, exchange, self._encoder)
        else:
            return self._create(exchange, *TASKS[segments[2]])
        return None

    async def _create(self, exchange: Exchange, task: str, kind: type[TranslationRequest]) -> None:
        content_type, body = exchange.header("content-type") or "", take_bytes(exchange)
        form = await asyncio.to_thread(read_form, content_type, body)
        request, sound = read_object(to_document(form), kind), sound_of(form)
        order = order_of(request, task)
        model, version = choose_model(self._server.registry, request.model, "transcribe")
        check_envelope(model)
        reply = TranscriptReply(exchange, model, self._server.config.error_style, request, task)
        job = Job(
            reply,
            request_id=exchange.request_id,
            headers=[],
            body=RequestBody(sound + order),
            arrived=exchange.arrived,
            fields=[("file", len(sound)), ("transcription", len(order))],
        )
        submit(reply, job, version)


def to_document(form: UploadForm) -> dict[str, Any]:
    """The fields of a form as the values of a JSON request; clients write lists as `name[]`."""
    document: dict[str, Any] = {}
    for name, values in form.fields.items():
        plain = name.removesuffix("[]")
        if plain in LISTS:
            document[plain] = [*document.get(plain, ()), *values]
        elif len(values) > 1:
            raise InvalidField(plain, f"{plain[:100]} is given {len(values)} times; send it once")
        else:
            document[plain] = number_of(values[0], plain) if plain in NUMBERS else values[0]
    return document


def number_of(value: str, name: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = float("nan")
    if found != found:
        raise InvalidField(name, f"{name}: expected a number, not {value[:40]!r}")
    return found


def sound_of(form: UploadForm) -> bytes:
    for name in form.files:
        if name != "file":
            raise InvalidField(name[:100], f"unknown file {name[:100]!r}; send one file, in the field named file")
    if "file" not in form.files:
        raise InvalidField("file", "file is required: the sound itself, as a part of the form with a filename")
    content = form.files["file"][1]
    if not content:
        raise InvalidField("file", "file is empty; send a sound")
    return content


def order_of(request: TranslationRequest, task: str) -> bytes:
    """What the handler is to do with the sound, as JSON; fields that are not given are absent."""
    order: dict[str, Any] = {"task": task, "timestamps": request.timestamps}
    if request.is_streamed:
        order["stream"] = True
    for name in ("language", "prompt", "temperature"):
        if (value := getattr(request, name, None)) is not None:
            order[name] = value
    return msgspec.json.encode(order)


class TranscriptReply(EventReply):
    """Writes a handler's transcript in the format that the request asks for, whole or as events."""

    __slots__ = ("_format", "_has_text", "_pieces", "_task", "_timestamps")

    def __init__(
        self, exchange: Exchange, model: Model, style: ErrorStyle, request: TranslationRequest, task: str
    ) -> None:
        super().__init__(exchange, model, style, is_streamed=request.is_streamed)
        self._format, self._timestamps, self._task = request.response_format or "json", request.timestamps, task
        self._pieces: list[Transcript] = []
        self._has_text = False  # in an event

    def on_parts(self, parts: list[Part]) -> None:
        if parts[0].status >= 400 and not self._pieces:
            self.reject(JobFailed(parts[0].body.decode("utf-8", "replace"), status=parts[0].status))
            return
        ends = parts[-1].last
        try:
            pieces = [read_transcript(part.body) for part in parts if part.body]
            whole = joined([*self._pieces, *pieces], self._timestamps) if ends else None
        except msgspec.DecodeError as error:
            text = f"The handler of {self.model.name!r} did not answer as one that {EXPECTED} ({error})."
            self.reject(JobFailed(text, status=500))
            return
        if self.is_streamed:
            self._stream(pieces, whole)
        elif whole is not None:
            self.model.answers[200] += 1
            content_type = ("content-type", content_type_of(self._format))
            self.exchange.respond(200, to_body(whole, self._format, self._task), [content_type])
        self._pieces += pieces

    def _stream(self, pieces: Sequence[Transcript], whole: Transcript | None) -> None:
        events = []
        for piece in pieces:
            if delta := piece.text if self._has_text else piece.text.lstrip():
                events.append(to_event({"type": "transcript.text.delta", "delta": delta}))
                self._has_text = True
        if whole is not None:
            events.append(to_event({"type": "transcript.text.done", "text": whole.text.strip()}))
        if events:
            self.send_events(events, ends=whole is not None)


# ---- the API description ----


def _operation(path: str, operation_id: str, summary: str, kind: type) -> Operation:
    schema = request_schema(kind)
    file: Schema = {"type": "string", "format": "binary", "description": "A sound file."}
    form = {**schema, "required": [*schema["required"], "file"], "properties": {"file": file, **schema["properties"]}}
    return Operation(
        path=path,
        method="post",
        id=operation_id,
        summary=summary,
        body={"multipart/form-data": form},
        errors=STATUSES,
        error=OPENAI_ERROR,
    )


OPERATIONS = [
    _operation("/v1/audio/transcriptions", "createTranscription", "Write down speech (OpenAI).", TranscriptionRequest),
    _operation(
        "/v1/audio/translations", "createTranslation", "Write down speech in English (OpenAI).", TranslationRequest
    ),
    operation("/v1/audio/speech", "createSpeech", "Speak a text (OpenAI).", SpeechRequest),
]
