"""InferenceService: Ping, Predictions, StreamPredictions, and StreamPredictions2 with its sequences."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping

from flambeau.config.server import ErrorStyle, SequenceHeaders
from flambeau.errors import BadRequest, FlambeauError
from flambeau.frontend.authorization import Keys
from flambeau.frontend.grpc import status
from flambeau.frontend.grpc.messages import (
    Empty,
    ErrorInfo,
    HealthResponse,
    PredictionResponse,
    PredictionsRequest,
)
from flambeau.frontend.grpc.predictions import Headers, StreamReply, UnaryReply, add_inputs, find_model
from flambeau.frontend.grpc.service import GrpcService, Message
from flambeau.frontend.grpc.status import of_prediction
from flambeau.frontend.http.errors import message_of, to_json
from flambeau.serving.reply_budget import ReplyBudget
from flambeau.serving.server import Server

SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
MAX_OPEN = 100  # unanswered requests of one stream; further ones are not read
ERROR_INFO = "type.googleapis.com/google.rpc.ErrorInfo"


class InferenceService(GrpcService):
    """The inference service of existing clients."""

    def __init__(self, server: Server, keys: Keys | None) -> None:
        super().__init__(
            SERVICE,
            max_bytes=server.config.max_request_bytes,
            read_timeout_s=server.config.request_read_timeout_s,
            keys=keys,
            statuses=status.of_prediction,
            style=server.config.error_style,
            write_timeout_s=server.config.response_read_timeout_s,
        )
        self._server = server
        self._unread = ReplyBudget[StreamReply](server.config.max_response_bytes)
        self.one("Ping", Empty, self.ping)
        self.one("Predictions", PredictionsRequest, self.predict)
        self.many("StreamPredictions", PredictionsRequest, self.stream)
        self.both("StreamPredictions2", PredictionsRequest, self.stream_sequences)

    async def ping(self, request: Message) -> Message:
        text = to_json({"status": "Healthy" if self._server.is_healthy else "Unhealthy"})
        return HealthResponse(health=text.decode().rstrip())

    async def predict(self, request: Message) -> Message:
        server = self._server
        model = find_model(server, request.model_name, request.model_version)
        reply = UnaryReply(model, server.config.max_response_bytes)
        add_inputs(server, model, request.model_version, request.input, reply, [])
        try:
            return PredictionResponse(prediction=await reply.done)
        finally:
            reply.cancel()

    async def stream(self, request: Message) -> AsyncIterator[Message]:
        server = self._server
        model = find_model(server, request.model_name, request.model_version)
        reply = StreamReply(model, self._unread)
        add_inputs(server, model, request.model_version, request.input, reply, [])
        try:
            async for body in reply.bodies():
                yield PredictionResponse(prediction=body)
        finally:
            reply.cancel()

    def stream_sequences(self, requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        return SequenceStream(self._server, requests, self._unread).replies()


Line = deque[StreamReply | FlambeauError]


class SequenceStream:
    """One call of StreamPredictions2.

    The replies of a sequence have the order of its requests. Sequences do not wait for each other, nor do the requests
    of a model with continuous batching. A client that does not read limits what is buffered: one message to send, and
    MAX_OPEN unanswered requests.
    """

    def __init__(self, server: Server, requests: AsyncIterator[Message], unread: ReplyBudget[StreamReply]) -> None:
        self._server = server
        self._requests = requests
        self._unread = unread
        self._lines: dict[object, Line] = {}  # requests that are answered in order
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(1)
        self._places = asyncio.Semaphore(MAX_OPEN)

    async def replies(self) -> AsyncIterator[Message]:
        """Messages for the client, until all its requests are answered."""
        reader = asyncio.get_running_loop().create_task(self._run())
        try:
            while (message := await self._messages.get()) is not None:
                yield message
            await reader
        finally:
            reader.cancel()
            await asyncio.wait([reader])
            for line in self._lines.values():
                for reply in line:
                    if isinstance(reply, StreamReply):
                        reply.cancel()

    async def _run(self) -> None:
        broken: Exception | None = None
        try:
            async with asyncio.TaskGroup() as lines:
                try:
                    await self._read(lines)
                except FlambeauError as error:  # an invalid message: the earlier requests are answered first
                    broken = error
        except* Exception as errors:
            broken = errors.exceptions[0]
        await self._messages.put(None)
        if broken is not None:
            raise broken

    async def _read(self, lines: asyncio.TaskGroup) -> None:
        """Read requests, and start a task for each line."""
        async for request in self._requests:
            await self._places.acquire()
            sequence_id, reply = self._begin(request)
            is_continuous = isinstance(reply, StreamReply) and reply.model.config.continuous_batching
            key: object = reply if is_continuous else sequence_id
            if key in self._lines:
                self._lines[key].append(reply)
            else:
                self._lines[key] = deque([reply])
                lines.create_task(self._answer(key, sequence_id))

    def _begin(self, request: Message) -> tuple[str, StreamReply | FlambeauError]:
        """Submit a request to its model."""
        sequence_id: str = request.sequence_id
        try:
            sequence_id, headers = sequence_of(sequence_id, request.input, self._server.config.sequence_headers)
            model = find_model(self._server, request.model_name, request.model_version)
            reply = StreamReply(model, self._unread)
            add_inputs(self._server, model, request.model_version, request.input, reply, headers)
        except FlambeauError as error:
            return sequence_id, error
        return sequence_id, reply

    async def _answer(self, key: object, sequence_id: str) -> None:
        """Send the replies of one line in order."""
        line = self._lines[key]
        while line:
            reply = line.popleft()
            try:
                if isinstance(reply, FlambeauError):
                    raise reply
                async for body in reply.bodies():
                    await self._messages.put(PredictionResponse(prediction=body, sequence_id=sequence_id))
            except FlambeauError as error:
                await self._messages.put(to_message(error, sequence_id, self._server.config.error_style))
            finally:
                if isinstance(reply, StreamReply):
                    reply.cancel()
            self._places.release()
        del self._lines[key]


def sequence_of(sequence_id: str, inputs: Mapping[str, bytes], names: SequenceHeaders) -> tuple[str, Headers]:
    """The id of a request's sequence, and headers for the handler; a new sequence needs no id."""
    starts, ends = is_true(inputs, names.start), is_true(inputs, names.end)
    if not sequence_id:
        if not starts:
            raise BadRequest("Parameter sequenceId is required.")
        sequence_id = f"ts-seq-{uuid.uuid4()}"
    headers = [(names.id, sequence_id)]
    if starts:
        headers.append((names.start, "true"))
    if ends:
        headers.append((names.end, "true"))
    return sequence_id, headers


def is_true(inputs: Mapping[str, bytes], name: str) -> bool:
    return name in inputs and inputs[name].strip().lower() == b"true"


def to_message(error: FlambeauError, sequence_id: str, style: ErrorStyle) -> Message:
    """An error as a message of the stream."""
    code, name = of_prediction(error)
    message = PredictionResponse(sequence_id=sequence_id or None)
    message.status.code, message.status.message = code.value[0], message_of(error, style)
    message.status.details.add(type_url=ERROR_INFO, value=ErrorInfo(reason=name).SerializeToString())
    return message
