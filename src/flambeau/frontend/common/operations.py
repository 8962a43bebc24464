"""Operations of the management APIs, for HTTP and gRPC: register, scale, describe, list, set default, unregister."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass
from typing import Any

from flambeau.config.model import ModelConfig
from flambeau.errors import BadRequest, JobFailed, NotAllowed, Unavailable
from flambeau.frontend.common.model_document import model_document
from flambeau.logs.line_formats import masked
from flambeau.serving.job import Job, ReplyCollector, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.serving.workers.host_resources import gpu_usage

PAGE = 100
MAX_WORKERS = 10_000  # of a model; more are a mistake or an attack


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """The parameters of a register call; None: not given."""

    url: str | None
    model_name: str | None = None
    handler: str | None = None
    runtime: str | None = None
    batch_size: int | None = None
    max_batch_delay_ms: int | None = None
    response_timeout_s: int | None = None
    startup_timeout_s: int | None = None
    initial_workers: int | None = None
    synchronous: bool = True
    s3_sse_kms: bool = False


@dataclass(frozen=True, slots=True)
class OperationResult:
    """The result of a call, in the words that existing clients match; `code` is the HTTP status."""

    code: int
    text: str


async def register(server: Server, registration: Registration) -> OperationResult:
    """Register a model. A registration that has started is finished even if its client disconnects."""
    check_model_api(server)
    if registration.url is None:
        raise BadRequest("Parameter url is required.")
    defaults = server.config
    workers = max(0, defaults.default_workers if registration.initial_workers is None else registration.initial_workers)
    check_workers(workers)
    config = ModelConfig(
        min_workers=workers,
        max_workers=workers,
        response_timeout_s=defaults.default_response_timeout_s
        if registration.response_timeout_s is None
        else registration.response_timeout_s,
        startup_timeout_s=registration.startup_timeout_s or defaults.default_startup_timeout_s,
        queue_size=defaults.job_queue_size,
    )
    overrides: dict[str, Any] = {}  # these two override the model's own YAML
    if registration.batch_size:
        overrides["batch_size"] = registration.batch_size
    if registration.max_batch_delay_ms is not None:
        overrides["batch_delay_s"] = registration.max_batch_delay_ms / 1000
    model = await asyncio.shield(
        server.register(
            registration.url,
            name=registration.model_name,
            handler=registration.handler,
            runtime=registration.runtime,
            config=config,
            overrides=overrides,
            wait=registration.synchronous,
            signed=registration.s3_sse_kms,
        )
    )
    named = f'Model "{model.name}" Version: {model.version} registered with'
    if not model.config.min_workers:
        return OperationResult(200, f"{named} 0 initial workers. Use scale workers API to add workers for the model.")
    if registration.synchronous:
        return OperationResult(200, f"{named} {model.config.min_workers} initial workers")
    return OperationResult(202, "Processing worker updates...")


async def scale(
    server: Server, name: str, version: str | None, minimum: int, maximum: int, *, synchronous: bool
) -> OperationResult:
    check_workers(minimum)
    await asyncio.shield(server.scale(name, version, minimum, maximum, wait=synchronous))
    if not synchronous:
        return OperationResult(202, "Processing worker updates...")
    named = f", version: {version}" if version else ""
    return OperationResult(200, f"Workers scaled to {minimum} for model: {name}{named}")


async def unregister(server: Server, name: str, version: str | None) -> OperationResult:
    """Finish the requests that the model has accepted, then remove it."""
    check_model_api(server)
    await asyncio.shield(server.unregister(name, version))
    return OperationResult(200, f'Model "{name}" unregistered')


def set_default(server: Server, name: str, version: str) -> OperationResult:
    """Make this version the one for requests that name none."""
    server.set_default(name, version)
    return OperationResult(200, f'Default version successfully updated for model "{name}" to "{version}"')


def list_models(server: Server, limit: int, start: int) -> dict[str, Any]:
    """A page of the default versions, by name."""
    start, limit = max(0, start), limit if 0 <= limit <= PAGE else PAGE
    everything = [model for model in server.registry.defaults() if model.is_listed]
    document: dict[str, Any] = {}
    if start + limit < len(everything):
        document["nextPageToken"] = str(start + limit)
    page = everything[start : start + limit]
    document["models"] = [{"modelName": model.name, "modelUrl": masked(model.source.url)} for model in page]
    return document


async def describe(server: Server, name: str, version: str | None, *, customized: bool) -> list[dict[str, Any]]:
    """Settings, workers and their last failures, of one version or of `all`."""
    details = server.config.shows_error_details
    models = server.registry.versions(name) if version == "all" else [server.registry.find(name, version)]
    on_gpu = any(slot.device is not None for model in models for slot in model.pool.slots)
    gpus = await asyncio.to_thread(gpu_usage) if on_gpu else {}
    if version == "all":
        return [model_document(model, details=details, gpus=gpus) for model in models]
    [model] = models
    document = model_document(model, details=details, gpus=gpus)
    if customized and (metadata := await ask_handler(model)):
        document["customizedMetadata"] = metadata
    return [document]


def check_model_api(server: Server) -> None:
    """Raise NotAllowed unless the configuration allows models to be registered and removed."""
    if not server.config.model_api:
        raise NotAllowed("Requested method is not allowed, please refer to API document.")


def check_workers(count: int) -> None:
    """Reject more workers than any machine can run."""
    if count > MAX_WORKERS:
        raise BadRequest(f"{count} workers are too many; a model may have {MAX_WORKERS}")


async def ask_handler(model: Model) -> dict[str, Any]:
    """The handler's own description; empty if it is not a JSON object."""
    if not (model.pool.may_recover or model.pool.is_sleeping):
        raise Unavailable(
            f'Model "{model.name}" has no worker to serve describe request. '
            "Please use scale workers API to add workers."
        )
    answer = ReplyCollector()
    now = asyncio.get_running_loop().time()
    job = Job(answer, request_id=str(uuid.uuid4()), headers=[], body=RequestBody(b""), arrived=now, kind="describe")
    model.add(job)
    try:
        async with asyncio.timeout(model.config.response_timeout_s):
            document = json.loads(await answer.done)
    except TimeoutError:
        raise JobFailed("Failed to get customized model matadata.", status=500) from None  # codespell:ignore matadata
    except ValueError:
        return {}
    finally:
        job.cancel()
    return document if isinstance(document, dict) else {}
