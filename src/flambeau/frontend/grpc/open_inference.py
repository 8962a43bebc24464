"""The Open Inference service, under TorchServe's name and under the protocol's own; any model answers it."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from flambeau import __version__
from flambeau.errors import BadRequest, JobFailed
from flambeau.frontend.authorization import Keys
from flambeau.frontend.grpc import status, tensors
from flambeau.frontend.grpc.calls import Message, Service
from flambeau.frontend.grpc.jobs import Headers, add, find_model, to_body
from flambeau.frontend.grpc.messages import Malformed, open_inference
from flambeau.frontend.grpc.replies import WholeReply
from flambeau.frontend.http.exchange import new_request_id
from flambeau.serving.job import Job
from flambeau.serving.model import Model
from flambeau.serving.server import Server

SERVICE = "org.pytorch.serve.grpc.openinference.GRPCInferenceService"
STANDARD = "inference.GRPCInferenceService"  # what clients of the protocol call it
EXTENSIONS = ["kserve", "kubeflow", "binary_tensor_data", "model_repository"]
HEAD_LENGTH = "Inference-Header-Content-Length"  # how much of a body is JSON; binary tensors follow it
ENVELOPES = {"": "open_inference"}  # a model that has an envelope keeps it
MAX_ITEMS = 1000  # inputs, outputs, or parameters of all of them
MAX_DIMENSIONS = 8
LARGE = 65_536  # elements of a request, or bytes of a reply, from which on they are converted in a thread
KNOWS_BINARY = ("", "open_inference", "kservev2")

ModelInferResponse = open_inference("ModelInferResponse")


def open_inference_services(server: Server, keys: Keys | None) -> list[Service]:
    """The calls of the Open Inference Protocol, under both names."""
    limit = server.config.max_request_bytes
    services = [
        Service(
            name,
            max_bytes=limit,
            read_timeout_s=server.config.request_read_timeout_s,
            keys=keys,
            statuses=status.of_open_inference,
        )
        for name in (SERVICE, STANDARD)
    ]
    calls = {
        "ServerLive": server_live,
        "ServerReady": server_ready,
        "ServerMetadata": server_metadata,
        "ModelReady": model_ready,
        "ModelMetadata": model_metadata,
        "ModelInfer": model_infer,
    }
    for service in services:
        for name, call in calls.items():
            service.one(name, open_inference(f"{name}Request"), partial(call, server))
    return services


async def server_live(server: Server, request: Message) -> Message:
    """Whether the process lives."""
    return open_inference("ServerLiveResponse")(live=True)


async def server_ready(server: Server, request: Message) -> Message:
    """Whether every model answers."""
    return open_inference("ServerReadyResponse")(ready=server.is_ready)


async def server_metadata(server: Server, request: Message) -> Message:
    """What this server is."""
    return open_inference("ServerMetadataResponse")(name="Torchserve", version=__version__, extensions=EXTENSIONS)


async def model_ready(server: Server, request: Message) -> Message:
    """Whether a model has the workers it should have."""
    model = named(server, request)
    return open_inference("ModelReadyResponse")(ready=model.pool.num_ready >= model.pool.min_workers)


async def model_metadata(server: Server, request: Message) -> Message:
    """A model's versions; handlers do not declare their tensors."""
    model = named(server, request)
    versions = [other.version for other in server.registry.versions(model.name)]
    return open_inference("ModelMetadataResponse")(name=model.name, versions=versions)


def named(server: Server, request: Message) -> Model:
    """The model that a call about a model names."""
    if not request.name:
        raise BadRequest("Parameter name is required.")
    return server.registry.find(request.name, request.version or None)


async def model_infer(server: Server, request: Message) -> Message:
    """Tensors in, tensors out; raw where the request is raw."""
    model = find_model(server, request.model_name, request.model_version)
    binary = model.envelope in KNOWS_BINARY
    check_size(request)
    convert = partial(to_values, request, binary=binary)
    headers, values = await asyncio.to_thread(convert) if is_large(request, binary=binary) else convert()
    reply = WholeReply(model, server.config.max_response_bytes)
    job = Job(
        reply,
        request_id=new_request_id(),
        headers=headers,
        body=to_body(server, values),
        arrived=time.monotonic(),
        envelope=ENVELOPES.get(model.envelope, ""),
    )
    add(model, request.model_version, reply, job)
    try:
        body = await reply.done
    finally:
        reply.cancel()
    respond = partial(to_response, body, reply.headers, raw=bool(request.raw_input_contents))
    return await asyncio.to_thread(respond) if len(body) > LARGE else respond()


# ---- the request: one JSON document, and behind it the tensors as bytes, as over HTTP ----


def check_size(request: Message) -> None:
    """Refuse more than anybody needs, each of which costs far more time than bytes."""
    num_parameters = len(request.parameters)
    for kind, found in (("inputs", request.inputs), ("outputs", request.outputs)):
        if len(found) > MAX_ITEMS:
            raise Malformed(f"the request has {len(found)} {kind}; {MAX_ITEMS} are allowed")
        num_parameters += sum(len(item.parameters) for item in found)
    if num_parameters > MAX_ITEMS:
        raise Malformed(f"the request has {num_parameters} parameters; {MAX_ITEMS} are allowed")
    for tensor in request.inputs:
        if len(tensor.shape) > MAX_DIMENSIONS:
            text = f"input {tensor.name!r} has {len(tensor.shape)} dimensions; {MAX_DIMENSIONS} are allowed"
            raise Malformed(text)


def is_large(request: Message, *, binary: bool) -> bool:
    """Whether so much is to be converted that others would notice it."""
    size = 0 if binary else sum(map(len, request.raw_input_contents))
    fields = tensors.FIELD_NAMES
    return size + sum(len(getattr(one.contents, name)) for one in request.inputs for name in fields) > LARGE


def to_values(request: Message, *, binary: bool) -> tuple[Headers, list[bytes]]:
    """The headers and the body of a request, in pieces; without `binary` all of it is JSON."""
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise Malformed(f"{len(request.inputs)} inputs came with {len(raws)} raw_input_contents; there must be as many")
    inputs, pieces = [], []
    for i, tensor in enumerate(request.inputs):
        entry, piece = to_entry(tensor, raws[i] if raws else None, binary=binary)
        inputs.append(entry)
        pieces.append(piece)
    document: dict[str, Any] = {"id": request.id, "model_name": request.model_name, "inputs": inputs}
    parameters = to_dict(request.parameters)
    if binary:
        parameters["binary_data_output"] = True
    if parameters:
        document["parameters"] = parameters
    if request.outputs:
        document["outputs"] = [{"name": o.name, "parameters": to_dict(o.parameters)} for o in request.outputs]
    head = "".join(tensors.to_json(document)).encode()
    if not any(pieces):
        return [("content-type", "application/json")], [head]
    return [("content-type", "application/octet-stream"), (HEAD_LENGTH, str(len(head)))], [head, *pieces]


def to_entry(tensor: Message, raw: bytes | None, *, binary: bool) -> tuple[dict[str, Any], bytes]:
    """One input: its place in the document, and its bytes. BYTES in typed fields are base64 texts, as in TorchServe."""
    datatype: str = tensor.datatype
    entry: dict[str, Any] = {"name": tensor.name, "shape": [*tensor.shape], "datatype": datatype}
    parameters = to_dict(tensor.parameters)
    if raw is None:
        values = tensors.contents_of(tensor.name, datatype, tensor.contents)
        if datatype == tensors.BYTES:
            entry["data"] = [base64.b64encode(value).decode() for value in values]
        elif binary:
            raw = tensors.pack(datatype, values)
        else:
            entry["data"] = [value for chunk in tensors.in_chunks(values) for value in chunk]
    elif not binary:
        values = tensors.unpack(datatype, raw)
        is_bytes = datatype == tensors.BYTES
        entry["data"] = [base64.b64encode(value).decode() for value in values] if is_bytes else [*values]
        raw = None
    if raw is not None:
        parameters["binary_data_size"] = len(raw)
    if parameters:
        entry["parameters"] = parameters
    return entry, raw or b""


def to_dict(parameters: Mapping[str, Message]) -> dict[str, Any]:
    """Parameters as JSON has them."""
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], choice) for name, choice in chosen.items() if choice}


# ---- the response ----


def to_response(body: bytes, headers: Headers, *, raw: bool) -> Message:
    """A model's reply as a message."""
    try:
        document, pieces = read_reply(body, headers)
        return fill(document, pieces, raw=raw)
    except (ValueError, TypeError, KeyError, AttributeError, BadRequest) as error:
        text = "The model did not answer in the Open Inference Protocol."
        raise JobFailed(text, status=500, cause=f"{type(error).__name__}: {error}") from None


def read_reply(body: bytes, headers: Headers) -> tuple[dict[str, Any], list[bytes | None]]:
    """The document of a reply, and the bytes of each output that has some."""
    length = next((int(value) for name, value in headers if name.lower() == HEAD_LENGTH.lower()), len(body))
    document = json.loads(body[:length])
    pieces: list[bytes | None] = []
    for output in document["outputs"]:
        size = output.get("parameters", {}).pop("binary_data_size", None)
        pieces.append(None if size is None else body[length : length + size])
        length += size or 0
    return document, pieces


def fill(document: Mapping[str, Any], pieces: list[bytes | None], *, raw: bool) -> Message:
    """The message of a reply: all outputs raw or all typed; FP16 has no typed field."""
    response = ModelInferResponse(
        model_name=document.get("model_name") or "",
        model_version=str(document.get("model_version") or ""),
        id=document.get("id") or "",
    )
    put_parameters(response.parameters, document.get("parameters") or {})
    raw = raw or any(output["datatype"] in tensors.RAW_ONLY for output in document["outputs"])
    for output, piece in zip(document["outputs"], pieces, strict=True):
        datatype = output["datatype"]
        tensor = response.outputs.add(name=output["name"], datatype=datatype, shape=output["shape"])
        put_parameters(tensor.parameters, output.get("parameters") or {})
        if raw:
            flat = piece if piece is not None else tensors.pack(datatype, [*tensors.flatten(output["data"])])
            response.raw_output_contents.append(flat)
        else:
            values = tensors.flatten(output["data"]) if piece is None else tensors.unpack(datatype, piece)
            tensors.put_contents(tensor.contents, datatype, values)
    return response


def put_parameters(target: Any, parameters: Mapping[str, Any]) -> None:
    """Parameters as messages have them; what is no bool, number or text goes as its JSON."""
    for name, value in parameters.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int):
            target[name].int64_param = value
        else:
            target[name].string_param = value if isinstance(value, str) else json.dumps(value)
