"""A generation's reply on its way to the client: whole, or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.errors import BadRequest, FlambeauError, JobFailed
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.forms import bytes_of
from flambeau.frontend.http.inference import Prediction, submit
from flambeau.frontend.http.openai.problems import openai_problem, openai_status
from flambeau.frontend.http.openai.writing import Writer
from flambeau.frontend.http.problems import JSON_TYPE, status_and_type
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.model import Model
from flambeau.wire.generation import Generate, Piece, decode_pieces, encode_request
from flambeau.wire.messages import Part

# Proxies that collect a response before they pass it on would take the stream out of streaming.
EVENT_STREAM: Sequence[Header] = (("content-type", "text/event-stream; charset=utf-8"), ("x-accel-buffering", "no"))
DONE = b"data: [DONE]\n\n"


class GenerationReply(Prediction):
    """Writes the pieces of a generation to its exchange."""

    __slots__ = ("_is_streamed", "_pieces", "_writer")

    def __init__(self, exchange: Exchange, model: Model, details: bool, writer: Writer, *, is_streamed: bool) -> None:
        super().__init__(exchange, model, details)
        self._writer = writer
        self._is_streamed = is_streamed
        self._pieces: list[Piece] = []

    def on_parts(self, parts: list[Part]) -> None:
        """Send the events of parts, now; or keep them until the last has come."""
        if parts[0].status >= 400:  # the handler's own word for an error; what may follow is for nobody
            if self.exchange.on_gone is not None:
                self.exchange.on_gone()
            self.on_error(JobFailed(parts[0].body.decode("utf-8", "replace"), status=parts[0].status))
        elif self._is_streamed:
            self._stream(parts)
        else:
            for part in parts:
                self._keep(part)

    def _keep(self, part: Part) -> None:
        if part.body:
            self._pieces += decode_pieces(part.body)
        if part.last:
            body = self._writer.whole(self._pieces)
            self.model.answers[200] += 1
            self.exchange.respond(200, body, (JSON_TYPE,))

    def _stream(self, parts: list[Part]) -> None:
        events = self._writer.events
        chunks = [events(piece) for part in parts if part.body for piece in decode_pieces(part.body)]
        ends = parts[-1].last
        if ends:
            chunks += (self._writer.last_events(), DONE)
        exchange = self.exchange
        if not exchange.is_started:
            self.model.answers[200] += 1
            exchange.start(200, EVENT_STREAM)
        exchange.send((b"".join(chunks),), ends=ends)

    def on_error(self, error: FlambeauError) -> None:
        """Answer with the error; a stream that has begun ends with an event that tells it."""
        if not (self._is_streamed and self.exchange.is_started):
            super().on_error(error)
            return
        self.log(error)
        status = openai_status(error, status_and_type(error)[0])
        cause = getattr(error, "cause", "") if self._details else ""
        self.exchange.send((b"data: %b\n\n" % openai_problem(status, str(error), error, cause),), ends=True)


def generate(
    exchange: Exchange, model: Model, version: str | None, request: Generate, writer: Writer, *, details: bool
) -> None:
    """Give a request to its model as a job."""
    reply = GenerationReply(exchange, model, details, writer, is_streamed=request.stream)
    job = Job(
        reply,
        request_id=exchange.request_id,
        headers=exchange.headers,
        body=RequestBody(encoded(request)),
        arrived=exchange.arrived,
        kind="generate",
    )
    submit(reply, job, version)


def encoded(request: Generate) -> bytes:
    """The body of the job."""
    try:
        return encode_request(request)
    except OverflowError:  # in a tool or a variable of the template; the fields of the API have limits
        raise BadRequest("a number in the request has more than 64 bits") from None


def take_bytes(exchange: Exchange) -> bytes:
    """The body of a request, which is not needed any more once it has been read."""
    content = bytes_of(exchange)
    exchange.take_body().release()
    return content
