"""The management service: TorchServe's six calls; each answers with a text."""

from __future__ import annotations

from typing import Any

from flambeau.errors import BadRequest, NotAllowed
from flambeau.frontend import operations
from flambeau.frontend.authorization import Keys
from flambeau.frontend.grpc.calls import Message, Service
from flambeau.frontend.grpc.messages import management
from flambeau.frontend.http.problems import to_json
from flambeau.serving.server import Server

SERVICE = "org.pytorch.serve.grpc.management.ManagementAPIsService"
ManagementResponse = management("ManagementResponse")


def management_service(server: Server, keys: Keys | None) -> Service:
    """The calls of the management service. Empty texts and numbers up to 0 mean "not given"."""

    async def describe(request: Message) -> Message:
        version = request.model_version or None
        found = await operations.describe(server, request.model_name, version, customized=request.customized)
        return document(found)

    async def list_models(request: Message) -> Message:
        limit = positive(request.limit) or operations.PAGE
        return document(operations.list_models(server, limit, request.next_page_token))

    async def register(request: Message) -> Message:
        check_model_api(server)
        asked = operations.Registration(
            url=request.url or None,
            model_name=request.model_name or None,
            handler=request.handler or None,
            runtime=request.runtime or None,
            batch_size=positive(request.batch_size),
            max_batch_delay_ms=positive(request.max_batch_delay),
            response_timeout_s=positive(request.response_timeout),
            startup_timeout_s=positive(request.startup_timeout),
            initial_workers=positive(request.initial_workers),
            synchronous=request.synchronous,
            s3_sse_kms=request.s3_sse_kms,
        )
        return outcome(await operations.register(server, asked))

    async def scale(request: Message) -> Message:
        minimum = positive(request.min_worker) or 1
        maximum = positive(request.max_worker) or minimum
        name, version = request.model_name, request.model_version or None
        done = await operations.scale(server, name, version, minimum, maximum, synchronous=request.synchronous)
        return outcome(done)

    async def set_default(request: Message) -> Message:
        return outcome(operations.set_default(server, request.model_name, request.model_version))

    async def unregister(request: Message) -> Message:
        check_model_api(server)
        if not request.model_name:
            raise BadRequest("Parameter model_name is required.")
        return outcome(await operations.unregister(server, request.model_name, request.model_version or None))

    service = Service(
        SERVICE,
        max_bytes=server.config.max_request_bytes,
        read_timeout_s=server.config.request_read_timeout_s,
        keys=keys,
        kind="management",
    )
    service.one("DescribeModel", management("DescribeModelRequest"), describe)
    service.one("ListModels", management("ListModelsRequest"), list_models)
    service.one("RegisterModel", management("RegisterModelRequest"), register)
    service.one("ScaleWorker", management("ScaleWorkerRequest"), scale)
    service.one("SetDefault", management("SetDefaultRequest"), set_default)
    service.one("UnregisterModel", management("UnregisterModelRequest"), unregister)
    return service


def check_model_api(server: Server) -> None:
    """Refuse to change the set of models, in the words that gRPC clients know."""
    if not server.config.model_api:
        raise NotAllowed("Model API disabled")


def positive(number: int) -> int | None:
    """A number that was given."""
    return number if number > 0 else None


def outcome(done: operations.Outcome) -> Message:
    """The text of an outcome."""
    return ManagementResponse(msg=done.text)


def document(value: Any) -> Message:
    """The JSON text that the REST API has as its body."""
    return ManagementResponse(msg=to_json(value).decode().rstrip())
