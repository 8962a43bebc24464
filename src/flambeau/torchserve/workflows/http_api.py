"""The workflow API: /workflows registers, lists, describes and unregisters; /wfpredict runs a workflow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flambeau.config.server import ServerConfig
from flambeau.errors import BadRequest
from flambeau.frontend import operations
from flambeau.frontend.http.api_descriptions import model_document
from flambeau.frontend.http.bodies import media_type_of
from flambeau.frontend.http.errors import JSON_TYPE, respond_json
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.management import parameters
from flambeau.frontend.http.router import Endpoint, not_allowed, not_found, query_of
from flambeau.frontend.management_parameters import (
    LIST,
    RESPONSE_TIMEOUT,
    S3_SSE_KMS,
    STARTUP_TIMEOUT,
    URL,
    CallParameter,
    read_parameters,
)
from flambeau.logs.line_formats import masked
from flambeau.serving.model_sources.store import Store
from flambeau.serving.server import Server
from flambeau.torchserve.workflows.execution import WorkflowRequest
from flambeau.torchserve.workflows.registry import Workflow, WorkflowRegistry

logger = logging.getLogger(__name__)

WORKFLOW_NAME = CallParameter(name="workflow_name", kind="text", doc="Replaces the name in the manifest.")
REGISTER = (URL, WORKFLOW_NAME, RESPONSE_TIMEOUT, STARTUP_TIMEOUT, S3_SSE_KMS)


class WorkflowExtension:
    """Workflows as an extension of a server."""

    def __init__(self, server: Server) -> None:
        self._strict = server.config.strict_calls
        self.workflows = WorkflowRegistry(server, Store(workflow_store_of(server.config), server.store.downloader))

    @property
    def num_running(self) -> int:
        return self.workflows.num_running

    def http_routes(self, api: Literal["inference", "management"]) -> dict[str, Endpoint]:
        return {"wfpredict": self._predict} if api == "inference" else {"workflows": self._manage}

    async def close(self) -> None:
        await self.workflows.close()

    # ---- endpoints ----

    async def _manage(self, exchange: Exchange, segments: list[str]) -> None:
        """/workflows and /workflows/{workflow}. As in TorchServe, one more segment is ignored."""
        method = exchange.method
        if len(segments) == 1:
            collection = {"GET": self._list, "POST": self._register}.get(method)
            await collection(exchange) if collection else not_allowed(exchange)
        elif len(segments) > 3:
            not_found(exchange)
        else:
            one = {"GET": self._describe, "DELETE": self._unregister}.get(method)
            await one(exchange, segments[1]) if one else not_allowed(exchange)

    async def _predict(self, exchange: Exchange, segments: list[str]) -> None:
        """/wfpredict/{workflow}: any method but OPTIONS runs it. A lost connection cancels its nodes."""
        if len(segments) < 2:
            not_found(exchange)
            return
        workflow = self.workflows.find(segments[1])
        if exchange.method == "OPTIONS":
            respond_json(exchange, 200, model_document(workflow.name))
            return
        body = exchange.take_body()
        content = body.content if body.segment is None else bytes(body.segment.memory[: body.size_bytes])
        body.release()
        trace = exchange.trace
        request = WorkflowRequest(request_id=exchange.request_id, headers=exchange.headers, body=content, trace=trace)
        exchange.respond(200, await self.workflows.predict(segments[1], request), (JSON_TYPE,))

    async def _register(self, exchange: Exchange) -> None:
        strict = self._strict or media_type_of(exchange) == "application/json"
        values = read_parameters(REGISTER, parameters(exchange), strict=strict)
        if values["url"] is None:
            raise BadRequest("Parameter url is required.")
        # Shielded: a registration that has begun is finished even when its caller disconnects.
        workflow = await asyncio.shield(
            self.workflows.register(
                values["url"],
                name=values["workflow_name"],
                response_timeout_s=values["response_timeout"],
                startup_timeout_s=values["startup_timeout"],
                signed=values["s3_sse_kms"],
            )
        )
        _status(exchange, f"Workflow {workflow.name} has been registered and scaled successfully.")

    async def _list(self, exchange: Exchange) -> None:
        respond_json(exchange, 200, page([*self.workflows], query_of(exchange), strict=self._strict))

    async def _describe(self, exchange: Exchange, name: str) -> None:
        respond_json(exchange, 200, [document(self.workflows.find(name))])

    async def _unregister(self, exchange: Exchange, name: str) -> None:
        await asyncio.shield(self.workflows.unregister(name))
        _status(exchange, f'Workflow "{name}" unregistered')


def page(workflows: list[Workflow], query: Mapping[str, str], *, strict: bool = True) -> dict[str, Any]:
    """One page of the list of workflows."""
    values = read_parameters(LIST, query, strict=strict)
    start, limit = max(0, values["next_page_token"]), values["limit"]
    end = start + (limit if 0 <= limit <= operations.PAGE else operations.PAGE)
    token = {"nextPageToken": str(end)} if end < len(workflows) else {}
    shown = [{"workflowName": one.name, "workflowUrl": masked(one.source.url)} for one in workflows[start:end]]
    return {**token, "workflows": shown}


def document(workflow: Workflow) -> dict[str, Any]:
    """A workflow as `describe` shows it."""
    settings = workflow.source.spec.settings
    return {
        "workflowName": workflow.name,
        "workflowUrl": masked(workflow.source.url),
        "minWorkers": settings.min_workers,
        "maxWorkers": settings.max_workers,
        "batchSize": settings.batch_size,
        "maxBatchDelay": settings.max_batch_delay_ms,
        "workflowDag": str(workflow.source.spec.graph),
    }


def workflow_store_of(config: ServerConfig) -> Path | None:
    """The folder of workflow archives; None, with a warning, when the configured one does not exist."""
    store = config.workflow_store or config.model_store
    if config.workflow_store is not None and not config.workflow_store.is_dir():
        logger.warning("the workflow store %s is not a folder: no workflow can be registered from it", store)
        return None
    return store


def _status(exchange: Exchange, text: str) -> None:
    respond_json(exchange, 200, {"status": text})
