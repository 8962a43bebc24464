"""A prediction request → a job of its model."""

from __future__ import annotations

import time
from collections.abc import Mapping

from flambeau.errors import BadRequest, FlambeauError
from flambeau.frontend.grpc.messages import Malformed
from flambeau.frontend.grpc.replies import Reply
from flambeau.frontend.http.exchange import new_request_id
from flambeau.serving.job import Job, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server

MAX_INPUTS = 1000  # as many as a form has fields

Headers = list[tuple[str, str]]


def find_model(server: Server, name: str, version: str) -> Model:
    """The model that a call names; an empty version is the default one."""
    if not name:
        raise BadRequest("Parameter model_name is required.")
    return server.registry.find(name, version or None)


def add_inputs(
    server: Server, model: Model, version: str, inputs: Mapping[str, bytes], reply: Reply, headers: Headers
) -> None:
    """Give a model a request that came as a map of bytes; the handler gets the entries as they are."""
    if len(inputs) > MAX_INPUTS:
        raise Malformed(f"The request has {len(inputs)} inputs; {MAX_INPUTS} are allowed.")
    fields = [(name, len(value)) for name, value in inputs.items()]
    job = Job(
        reply,
        request_id=new_request_id(),
        headers=headers,
        body=to_body(server, [*inputs.values()]),
        arrived=time.monotonic(),
        fields=fields,
    )
    add(model, version, reply, job)


def add(model: Model, version: str, reply: Reply, job: Job) -> None:
    """Give a model a job; what it refuses is the reply."""
    reply.job = job
    try:
        model.add(job, requested_version=version or None)
    except FlambeauError as error:
        job.body.release()
        reply.on_error(error)


def to_body(server: Server, values: list[bytes]) -> RequestBody:
    """These values one after another: large ones in shared memory, where a worker reads them without a socket."""
    size = sum(map(len, values))
    if server.segments is None or size < server.config.shared_memory_from_bytes:
        return RequestBody(values[0] if len(values) == 1 else b"".join(values))
    try:
        segment = server.segments.take(size)
    except OSError:
        return RequestBody(values[0] if len(values) == 1 else b"".join(values))
    start = 0
    for value in values:
        segment.memory[start : start + len(value)] = value
        start += len(value)
    return RequestBody.shared(segment, size, server.segments.give_back)
