"""InferenceService: Ping, Predictions, StreamPredictions and StreamPredictions2."""

from __future__ import annotations

from collections.abc import AsyncIterator

from flambeau.frontend.common.authorization import Keys
from flambeau.frontend.grpc import status
from flambeau.frontend.grpc.messages import (
    Empty,
    HealthResponse,
    PredictionResponse,
    PredictionsRequest,
)
from flambeau.frontend.grpc.predictions import StreamReply, UnaryReply, add_inputs, find_model
from flambeau.frontend.grpc.sequences import SequenceStream
from flambeau.frontend.grpc.service import GrpcService, Message
from flambeau.frontend.http.errors import to_json
from flambeau.serving.server import Server

SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"


class InferenceService(GrpcService):
    """The inference service of existing clients."""

    def __init__(self, server: Server, keys: Keys | None) -> None:
        super().__init__(
            SERVICE,
            max_bytes=server.config.max_request_bytes,
            read_timeout_s=server.config.request_read_timeout_s,
            keys=keys,
            statuses=status.of_prediction,
        )
        self._server = server
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
        reply = StreamReply(model)
        add_inputs(server, model, request.model_version, request.input, reply, [])
        try:
            async for body in reply.bodies():
                yield PredictionResponse(prediction=body)
        finally:
            reply.cancel()

    def stream_sequences(self, requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        return SequenceStream(self._server, requests).replies()
