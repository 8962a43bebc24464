"""What the management APIs do, whichever protocol asks: register, scale, describe, list, set default, unregister."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass
from typing import Any

from flambeau.config.model import ModelConfig
from flambeau.errors import BadRequest, JobFailed, NotAllowed, Unavailable
from flambeau.frontend.model_document import model_document
from flambeau.logs.layouts import masked
from flambeau.serving.job import Job, ReplyCollector, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.serving.workers.host_resources import gpu_usage

PAGE = 100
MAX_WORKERS = 10_000  # of a model; more are a slip of the finger, or an attack


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What a register call asks for; None: not given."""

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
class Outcome:
    """How a call went, in TorchServe's words; `code` is the HTTP status."""

    code: int
    text: str


async def register(server: Server, asked: Registration) -> Outcome:
    """Register a model; a registration that has begun is finished even if its caller goes away."""
    check_model_api(server)
    if asked.url is None:
        raise BadRequest("Parameter url is required.")
    defaults = server.config
    workers = max(0, defaults.default_workers if asked.initial_workers is None else asked.initial_workers)
    check_workers(workers)
    config = ModelConfig(
        min_workers=workers,
        max_workers=workers,
        response_timeout_s=defaults.default_response_timeout_s
        if asked.response_timeout_s is None
        else asked.response_timeout_s,
        startup_timeout_s=asked.startup_timeout_s or defaults.default_startup_timeout_s,
        queue_size=defaults.job_queue_size,
    )
    wishes: dict[str, Any] = {}  # these two beat the model's own YAML, as in TorchServe
    if asked.batch_size:
        wishes["batch_size"] = asked.batch_size
    if asked.max_batch_delay_ms is not None:
        wishes["batch_delay_s"] = asked.max_batch_delay_ms / 1000
    model = await asyncio.shield(
        server.register(
            asked.url,
            name=asked.model_name,
            handler=asked.handler,
            runtime=asked.runtime,
            config=config,
            wishes=wishes,
            wait=asked.synchronous,
            signed=asked.s3_sse_kms,
        )
    )
    named = f'Model "{model.name}" Version: {model.version} registered with'
    if not model.config.min_workers:
        return Outcome(200, f"{named} 0 initial workers. Use scale workers API to add workers for the model.")
    if asked.synchronous:
        return Outcome(200, f"{named} {model.config.min_workers} initial workers")
    return Outcome(202, "Processing worker updates...")


async def scale(
    server: Server, name: str, version: str | None, minimum: int, maximum: int, *, synchronous: bool
) -> Outcome:
    """Change the number of a model's workers."""
    check_workers(minimum)
    await asyncio.shield(server.scale(name, version, minimum, maximum, wait=synchronous))
    if not synchronous:
        return Outcome(202, "Processing worker updates...")
    named = f", version: {version}" if version else ""
    return Outcome(200, f"Workers scaled to {minimum} for model: {name}{named}")


async def unregister(server: Server, name: str, version: str | None) -> Outcome:
    """Answer what the model has accepted, then let it go."""
    check_model_api(server)
    await asyncio.shield(server.unregister(name, version))
    return Outcome(200, f'Model "{name}" unregistered')


def set_default(server: Server, name: str, version: str) -> Outcome:
    """Send requests that name no version to this one."""
    server.set_default(name, version)
    return Outcome(200, f'Default version successfully updated for model "{name}" to "{version}"')


def list_models(server: Server, limit: int, start: int) -> dict[str, Any]:
    """The default versions, by name, a page at a time."""
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
    details = server.config.tells_details
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
    """Refuse to change the set of models, unless that was allowed at start."""
    if not server.config.model_api:
        raise NotAllowed("Requested method is not allowed, please refer to API document.")


def check_workers(count: int) -> None:
    """Refuse to start more workers than any machine has room for."""
    if count > MAX_WORKERS:
        raise BadRequest(f"{count} workers are too many; a model may have {MAX_WORKERS}")


async def ask_handler(model: Model) -> dict[str, Any]:
    """What the handler says about itself; nothing when it is not a JSON object."""
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
