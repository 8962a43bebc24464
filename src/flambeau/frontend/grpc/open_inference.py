"""OpenInferenceService: the Open Inference Protocol, for any model."""

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
from flambeau.frontend.grpc.messages import MalformedMessage, open_inference
from flambeau.frontend.grpc.predictions import Headers, UnaryReply, add, find_model, to_body
from flambeau.frontend.grpc.service import GrpcService, Message
from flambeau.frontend.http.exchange import new_request_id
from flambeau.frontend.http.kserve import EXTENSIONS, V2_ENVELOPES, metadata
from flambeau.serving.job import Job
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.messages import header

# The name that existing clients call, and the name in the protocol.
SERVICES = ("org.pytorch.serve.grpc.openinference.GRPCInferenceService", "inference.GRPCInferenceService")
HEAD_LENGTH = "Inference-Header-Content-Length"  # the length of the JSON part of a body; binary tensors follow it
MAX_ITEMS = 1000  # inputs, outputs, or parameters in total
MAX_DIMENSIONS = 8
LARGE = 65_536  # elements of a request, or bytes of a reply: larger ones are converted in a thread
KNOWS_BINARY = ("", "open_inference", "kservev2")

ModelInferResponse = open_inference("ModelInferResponse")


class OpenInferenceService(GrpcService):
    """The Open Inference Protocol; any model answers it."""

    def __init__(self, name: str, server: Server, keys: Keys | None) -> None:
        super().__init__(
            name,
            max_bytes=server.config.max_request_bytes,
            read_timeout_s=server.config.request_read_timeout_s,
            keys=keys,
            statuses=status.of_open_inference,
            style=server.config.error_style,
        )
        self._server = server
        calls = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ServerMetadata": self.server_metadata,
            "ModelReady": self.model_ready,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
        }
        for method, call in calls.items():
            self.one(method, open_inference(f"{method}Request"), call)

    async def server_live(self, request: Message) -> Message:
        return open_inference("ServerLiveResponse")(live=True)

    async def server_ready(self, request: Message) -> Message:
        """Whether every model can answer."""
        return open_inference("ServerReadyResponse")(ready=self._server.is_ready)

    async def server_metadata(self, request: Message) -> Message:
        name = self._server.config.server_name
        return open_inference("ServerMetadataResponse")(name=name, version=__version__, extensions=EXTENSIONS)

    async def model_ready(self, request: Message) -> Message:
        """Whether a model has all its workers."""
        model = self._named(request)
        return open_inference("ModelReadyResponse")(ready=model.pool.num_ready >= model.pool.min_workers)

    async def model_metadata(self, request: Message) -> Message:
        """The versions of a model, and its tensors if its handler declares them."""
        known = metadata(self._server, self._named(request))
        if self._server.config.server_name != "flambeau":
            del known["platform"]  # the API of that name sends none
        return open_inference("ModelMetadataResponse")(**known)

    def _named(self, request: Message) -> Model:
        if not request.name:
            raise BadRequest("Parameter name is required.")
        return self._server.registry.find(request.name, request.version or None)

    async def model_infer(self, request: Message) -> Message:
        """Tensors in, tensors out; raw if the request is raw."""
        server = self._server
        model = find_model(server, request.model_name, request.model_version)
        binary = model.envelope in KNOWS_BINARY
        check_size(request)
        convert = partial(to_values, request, binary=binary)
        headers, values = await asyncio.to_thread(convert) if is_large(request, binary=binary) else convert()
        reply = UnaryReply(model, server.config.max_response_bytes)
        job = Job(
            reply,
            request_id=new_request_id(),
            headers=headers,
            body=to_body(server, values),
            arrived=time.monotonic(),
            envelope=V2_ENVELOPES.get(model.envelope, ""),
        )
        add(model, request.model_version, reply, job)
        try:
            body = await reply.done
        finally:
            reply.cancel()
        respond = partial(to_response, body, reply.headers, raw=bool(request.raw_input_contents))
        return await asyncio.to_thread(respond) if len(body) > LARGE else respond()


# ---- the request: a JSON document followed by the tensors as bytes, as over HTTP ----


def check_size(request: Message) -> None:
    """Reject very many items: each costs far more time than its bytes."""
    num_parameters = len(request.parameters)
    for kind, found in (("inputs", request.inputs), ("outputs", request.outputs)):
        if len(found) > MAX_ITEMS:
            raise MalformedMessage(f"the request has {len(found)} {kind}; {MAX_ITEMS} are allowed")
        num_parameters += sum(len(item.parameters) for item in found)
    if num_parameters > MAX_ITEMS:
        raise MalformedMessage(f"the request has {num_parameters} parameters; {MAX_ITEMS} are allowed")
    for tensor in request.inputs:
        if len(tensor.shape) > MAX_DIMENSIONS:
            text = f"input {tensor.name!r} has {len(tensor.shape)} dimensions; {MAX_DIMENSIONS} are allowed"
            raise MalformedMessage(text)


def is_large(request: Message, *, binary: bool) -> bool:
    """Whether the conversion would delay other requests."""
    size = 0 if binary else sum(map(len, request.raw_input_contents))
    fields = tensors.FIELD_NAMES
    return size + sum(len(getattr(one.contents, name)) for one in request.inputs for name in fields) > LARGE


def to_values(request: Message, *, binary: bool) -> tuple[Headers, list[bytes]]:
    """The headers and the body of a request, in pieces; without `binary` it is all JSON."""
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise MalformedMessage(
            f"{len(request.inputs)} inputs came with {len(raws)} raw_input_contents; there must be as many"
        )
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
    """One input: its entry in the document, and its bytes. BYTES in typed fields become base64 text."""
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
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in parameters.items()}
    return {name: getattr(parameters[name], choice) for name, choice in chosen.items() if choice}


# ---- the response ----


def to_response(body: bytes, headers: Headers, *, raw: bool) -> Message:
    try:
        document, pieces = read_reply(body, headers)
        return fill(document, pieces, raw=raw)
    except (ValueError, TypeError, KeyError, AttributeError, BadRequest) as error:
        text = "The model did not answer in the Open Inference Protocol."
        raise JobFailed(text, status=500, cause=f"{type(error).__name__}: {error}") from None


def read_reply(body: bytes, headers: Headers) -> tuple[dict[str, Any], list[bytes | None]]:
    """The document of a reply, and the bytes of each binary output."""
    length = int(header(headers, HEAD_LENGTH.lower()) or len(body))
    document = json.loads(body[:length])
    pieces: list[bytes | None] = []
    for output in document["outputs"]:
        size = output.get("parameters", {}).pop("binary_data_size", None)
        pieces.append(None if size is None else body[length : length + size])
        length += size or 0
    return document, pieces


def fill(document: Mapping[str, Any], pieces: list[bytes | None], *, raw: bool) -> Message:
    """The message of a reply: all outputs are raw or all are typed; FP16 has no typed field."""
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
    """Set parameters; a value that is no bool, integer or text becomes JSON text."""
    for name, value in parameters.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, int):
            target[name].int64_param = value
        else:
            target[name].string_param = value if isinstance(value, str) else json.dumps(value)
