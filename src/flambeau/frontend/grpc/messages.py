"""The messages of the gRPC APIs, in their own descriptor pool, so that other copies of the files do not conflict."""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]

from flambeau.errors import BadRequest


def _load() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    compiled = resources.files("flambeau.frontend.grpc") / "protos" / "descriptors.binpb"
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file:
        pool.AddSerializedFile(file.SerializeToString())
    for known in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):  # so that reflection finds all services
        pool.AddSerializedFile(known.serialized_pb)
    return pool


POOL = _load()


class MalformedMessage(BadRequest):
    """The bytes of a message, or its content, are invalid."""


def message_class(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


def open_inference(name: str) -> Any:
    """The class of a message of the Open Inference Protocol."""
    return message_class(f"org.pytorch.serve.grpc.openinference.{name}")


Empty = message_class("google.protobuf.Empty")
ErrorInfo = message_class("google.rpc.ErrorInfo")
Status = message_class("google.rpc.Status")
PredictionsRequest = message_class("org.pytorch.serve.grpc.inference.PredictionsRequest")
PredictionResponse = message_class("org.pytorch.serve.grpc.inference.PredictionResponse")
HealthResponse = message_class("org.pytorch.serve.grpc.inference.TorchServeHealthResponse")


def management(name: str) -> Any:
    """The class of a message of the management service."""
    return message_class(f"org.pytorch.serve.grpc.management.{name}")


def parse(kind: Any, raw: bytes) -> Any:
    """Raises MalformedMessage for invalid bytes."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise MalformedMessage(f"The request is not a {kind.DESCRIPTOR.full_name}.") from None
