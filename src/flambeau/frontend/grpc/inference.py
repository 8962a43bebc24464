"""The inference service: Ping, Predictions, StreamPredictions; StreamPredictions2 is in sequences.py."""

from __future__ import annotations

from collections.abc import AsyncIterator

from flambeau.frontend.authorization import Keys
from flambeau.frontend.grpc import status
from flambeau.frontend.grpc.calls import Message, Service
from flambeau.frontend.grpc.jobs import add_inputs, find_model
from flambeau.frontend.grpc.messages import (
    Empty,
    PredictionResponse,
    PredictionsRequest,
    TorchServeHealthResponse,
)
from flambeau.frontend.grpc.replies import StreamedReply, WholeReply
from flambeau.frontend.grpc.sequences import SequenceStream
from flambeau.frontend.http.problems import to_json
from flambeau.serving.server import Server

SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"


def inference_service(server: Server, keys: Keys | None) -> Service:
    """The calls of the inference service."""

    async def ping(request: Message) -> Message:
        text = to_json({"status": "Healthy" if server.is_healthy else "Unhealthy"})
        return TorchServeHealthResponse(health=text.decode().rstrip())

    async def predict(request: Message) -> Message:
        model = find_model(server, request.model_name, request.model_version)
        reply = WholeReply(model, server.config.max_response_bytes)
        add_inputs(server, model, request.model_version, request.input, reply, [])
        try:
            return PredictionResponse(prediction=await reply.done)
        finally:
            reply.cancel()

    async def stream(request: Message) -> AsyncIterator[Message]:
        model = find_model(server, request.model_name, request.model_version)
        reply = StreamedReply(model)
        add_inputs(server, model, request.model_version, request.input, reply, [])
        try:
            async for body in reply.bodies():
                yield PredictionResponse(prediction=body)
        finally:
            reply.cancel()

    def stream_sequences(requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        return SequenceStream(server, requests).replies()

    limit = server.config.max_request_bytes
    service = Service(
        SERVICE,
        max_bytes=limit,
        read_timeout_s=server.config.request_read_timeout_s,
        keys=keys,
        statuses=status.of_prediction,
    )
    service.one("Ping", Empty, ping)
    service.one("Predictions", PredictionsRequest, predict)
    service.many("StreamPredictions", PredictionsRequest, stream)
    service.both("StreamPredictions2", PredictionsRequest, stream_sequences)
    return service
