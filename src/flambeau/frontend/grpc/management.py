"""ManagementService: the management API over gRPC. Each call returns a text."""

from __future__ import annotations

from typing import Any

from flambeau.errors import BadRequest, NotAllowed
from flambeau.frontend import operations
from flambeau.frontend.authorization import Keys
from flambeau.frontend.grpc.messages import management
from flambeau.frontend.grpc.service import GrpcService, Message
from flambeau.frontend.grpc.status import of_management, of_old_management
from flambeau.frontend.http.errors import to_json
from flambeau.frontend.management_parameters import LIST, REGISTER, SCALE, given_in, read_parameters, registration_of
from flambeau.serving.server import Server

SERVICE = "org.pytorch.serve.grpc.management.ManagementAPIsService"
ManagementResponse = management("ManagementResponse")


class ManagementService(GrpcService):
    """Empty texts and numbers up to 0 mean "not given"."""

    def __init__(self, server: Server, keys: Keys | None) -> None:
        super().__init__(
            SERVICE,
            max_bytes=server.config.max_request_bytes,
            read_timeout_s=server.config.request_read_timeout_s,
            keys=keys,
            kind="management",
            statuses=of_management if server.config.strict_calls else of_old_management,
            style=server.config.error_style,
        )
        self._server = server
        self.one("DescribeModel", management("DescribeModelRequest"), self.describe)
        self.one("ListModels", management("ListModelsRequest"), self.list_models)
        self.one("RegisterModel", management("RegisterModelRequest"), self.register)
        self.one("ScaleWorker", management("ScaleWorkerRequest"), self.scale)
        self.one("SetDefault", management("SetDefaultRequest"), self.set_default)
        self.one("UnregisterModel", management("UnregisterModelRequest"), self.unregister)

    async def describe(self, request: Message) -> Message:
        name, version = request.model_name, request.model_version or None
        return to_message(await operations.describe(self._server, name, version, customized=request.customized))

    async def list_models(self, request: Message) -> Message:
        values = read_parameters(LIST, given_in(LIST, request))
        return to_message(operations.list_models(self._server, values["limit"], values["next_page_token"]))

    async def register(self, request: Message) -> Message:
        check_model_api(self._server)
        registration = registration_of(read_parameters(REGISTER, given_in(REGISTER, request)))
        result = await operations.register(self._server, registration)
        return ManagementResponse(msg=result.text)

    async def scale(self, request: Message) -> Message:
        values = read_parameters(SCALE, given_in(SCALE, request))
        minimum, maximum = values["min_worker"], values["max_worker"] or values["min_worker"]
        waits = values["synchronous"]
        name, version = request.model_name, values["model_version"]
        result = await operations.scale(self._server, name, version, minimum, maximum, synchronous=waits)
        return ManagementResponse(msg=result.text)

    async def set_default(self, request: Message) -> Message:
        result = await operations.set_default(self._server, request.model_name, request.model_version)
        return ManagementResponse(msg=result.text)

    async def unregister(self, request: Message) -> Message:
        check_model_api(self._server)
        if not request.model_name:
            raise BadRequest("Parameter model_name is required.")
        result = await operations.unregister(self._server, request.model_name, request.model_version or None)
        return ManagementResponse(msg=result.text)


def check_model_api(server: Server) -> None:
    """Raise NotAllowed, in the words that gRPC clients match, if models may not be registered or removed."""
    if not server.config.model_api:
        raise NotAllowed("Model API disabled")


def to_message(document: Any) -> Message:
    """The JSON text that the HTTP API has as its body."""
    return ManagementResponse(msg=to_json(document).decode().rstrip())
