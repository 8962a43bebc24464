"""The workflow API: /workflows to register, list, describe and unregister; /wfpredict to run one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from flambeau.errors import BadRequest
from flambeau.frontend.common import operations
from flambeau.frontend.http.api_descriptions import model_document
from flambeau.frontend.http.errors import JSON_TYPE, respond_json
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.management import boolean, integer, parameters, positive, text
from flambeau.frontend.http.router import Endpoint, not_allowed, not_found, query_of
from flambeau.logs.layouts import masked
from flambeau.serving.server import Server
from flambeau.torchserve.workflows.execution import Call
from flambeau.torchserve.workflows.workflows import Workflow


def workflow_management_routes(server: Server) -> dict[str, Endpoint]:
    """The paths of workflows on the management listener."""
    return {"workflows": partial(workflows, server)}


def workflow_inference_routes(server: Server) -> dict[str, Endpoint]:
    """The paths of workflows on the inference listener."""
    return {"wfpredict": partial(predict, server)}


async def workflows(server: Server, exchange: Exchange, segments: list[str]) -> None:
    """/workflows and /workflows/{workflow}; what follows the name does not count, as in TorchServe."""
    method = exchange.method
    if len(segments) == 1:
        collection = {"GET": list_workflows, "POST": register}.get(method)
        await collection(server, exchange) if collection else not_allowed(exchange)
    elif len(segments) > 3:
        not_found(exchange)
    else:
        one = {"GET": describe, "DELETE": unregister}.get(method)
        await one(server, exchange, segments[1]) if one else not_allowed(exchange)


async def predict(server: Server, exchange: Exchange, segments: list[str]) -> None:
    """/wfpredict/{workflow}: any method but OPTIONS runs it; when the client goes, its nodes are told."""
    if len(segments) < 2:
        not_found(exchange)
        return
    workflow = server.workflows.find(segments[1])
    if exchange.method == "OPTIONS":
        respond_json(exchange, 200, model_document(workflow.name))
        return
    body = exchange.take_body()
    content = body.content if body.segment is None else bytes(body.segment.memory[: body.size_bytes])
    body.release()
    call = Call(request_id=exchange.request_id, headers=exchange.headers, body=content)
    exchange.respond(200, await server.workflows.predict(segments[1], call), (JSON_TYPE,))


async def register(server: Server, exchange: Exchange) -> None:
    """POST /workflows: a registration that has begun is finished even if its caller goes away."""
    given = parameters(exchange)
    url = given.get("url")
    if url is None:
        raise BadRequest("Parameter url is required.")
    workflow = await asyncio.shield(
        server.workflows.register(
            str(url),
            name=text(given, "workflow_name"),
            response_timeout_s=positive(given, "response_timeout"),
            startup_timeout_s=positive(given, "startup_timeout"),
            signed=boolean(given, "s3_sse_kms", False),
        )
    )
    _status(exchange, f"Workflow {workflow.name} has been registered and scaled successfully.")


async def list_workflows(server: Server, exchange: Exchange) -> None:
    """GET /workflows: by name, a page at a time."""
    respond_json(exchange, 200, page(server, query_of(exchange)))


async def describe(server: Server, exchange: Exchange, name: str) -> None:
    """GET /workflows/{workflow}: its settings and its graph."""
    respond_json(exchange, 200, [document(server.workflows.find(name))])


async def unregister(server: Server, exchange: Exchange, name: str) -> None:
    """DELETE /workflows/{workflow}: answer what was accepted, then let its nodes go."""
    await asyncio.shield(server.workflows.unregister(name))
    _status(exchange, f'Workflow "{name}" unregistered')


def page(server: Server, query: Mapping[str, str]) -> dict[str, Any]:
    """A page of the list."""
    start, limit = max(0, integer(query, "next_page_token", 0)), integer(query, "limit", operations.PAGE)
    end = start + (limit if 0 <= limit <= operations.PAGE else operations.PAGE)
    everything = [*server.workflows]
    token = {"nextPageToken": str(end)} if end < len(everything) else {}
    shown = [{"workflowName": one.name, "workflowUrl": masked(one.source.url)} for one in everything[start:end]]
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


def _status(exchange: Exchange, words: str) -> None:
    respond_json(exchange, 200, {"status": words})
