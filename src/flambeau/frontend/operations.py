"""Operations of the management APIs, for HTTP and gRPC, and the documents that describe models."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, TypeVar

from msgspec import to_builtins

from flambeau.config.model import MAX_WORKERS
from flambeau.errors import BadRequest, JobFailed, NotAllowed, Unavailable, WorkersFailed
from flambeau.logs.line_formats import masked
from flambeau.metrics.traffic import percentile
from flambeau.serving import adapters
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.job import Job, ReplyCollector, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.registry import default_settings
from flambeau.serving.server import Server
from flambeau.serving.slow_requests import slowest_of
from flambeau.serving.traffic_split import WHOLE
from flambeau.serving.workers.host_resources import gpu_usage
from flambeau.serving.workers.supervisor import Slot

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

PAGE = 100
FIRST_BUCKETS = 16
FAILED_FROM = 400  # statuses that are errors
NO_GPUS: Mapping[int, str] = MappingProxyType({})


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
    given = {"response_timeout_s": registration.response_timeout_s, "startup_timeout_s": registration.startup_timeout_s}
    timeouts = {name: value for name, value in given.items() if value is not None}
    bounds = {"min_workers": workers, "max_workers": workers}
    config = default_settings(defaults, workers=workers).updated(timeouts, "the register call")
    if registration.initial_workers is not None:
        config = config.updated(bounds, "the register call")
    elif defaults.default_workers:
        config = config.updated(bounds, "the setting default_workers")
    overrides: dict[str, Any] = {}  # these two override the model's own YAML
    if registration.batch_size:
        overrides["batch_size"] = registration.batch_size
    if registration.max_batch_delay_ms is not None:
        overrides["batch_delay_s"] = registration.max_batch_delay_ms / 1000
    model = await run_to_end(
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
    await server.change_saved()
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
    if not server.config.strict_calls:
        if minimum < 0 and maximum == minimum:
            server.registry.find(name, version)
            raise WorkersFailed(f"min_worker is {minimum}; it cannot be less than 0.", cause="")
        minimum = max(0, minimum) if maximum >= 0 else minimum
    try:
        await run_to_end(server.scale(name, version, minimum, maximum, wait=synchronous))
    except WorkersFailed as error:
        if version or server.config.strict_calls:
            raise
        # The text names the version of the call, and clients match it.
        text = f"Failed to start workers for model {name} version: null"
        raise WorkersFailed(text, cause=error.cause, out_of_memory=error.out_of_memory) from error
    await server.change_saved()
    if not synchronous:
        return OperationResult(202, "Processing worker updates...")
    named = f", version: {version}" if version else ""
    return OperationResult(200, f"Workers scaled to {minimum} for model: {name}{named}")


async def unregister(server: Server, name: str, version: str | None) -> OperationResult:
    """Finish the requests that the model has accepted, then remove it."""
    check_model_api(server)
    await run_to_end(server.unregister(name, version))
    await server.change_saved()
    return OperationResult(200, f'Model "{name}" unregistered')


async def load_adapter(server: Server, model: str | None, name: str | None, path: str | None) -> OperationResult:
    """Load a LoRA adapter on the workers of a model."""
    check_model_api(server)
    if not name or not path:
        raise BadRequest(f"{'lora_path' if name else 'lora_name'} is required.")
    if "#" in name or ":" in name:
        raise BadRequest(f"lora_name is {name!r}; it may hold no # and no :")
    base = generating_model(server, model)
    await run_to_end(adapters.load_adapter(base, name, path))
    return OperationResult(200, f'Adapter "{name}" loaded for model: {base.name}')


async def unload_adapter(server: Server, model: str | None, name: str | None) -> OperationResult:
    """Unload an adapter; the requests that use it are finished."""
    check_model_api(server)
    if not name:
        raise BadRequest("lora_name is required.")
    owners = [each for each in server.registry.defaults() if each.adapters.find(name) is not None]
    base = owners[0] if model is None and len(owners) == 1 else generating_model(server, model)
    await run_to_end(adapters.unload_adapter(base, name))
    return OperationResult(200, f'Adapter "{name}" unloaded from model: {base.name}')


def generating_model(server: Server, name: str | None) -> Model:
    """The model of this name, or the only one that generates text."""
    if name is not None:
        model = server.registry.find(name)
        if model.pool.has_loaded and "generate" not in model.abilities:
            raise BadRequest(
                f"The model {name!r} generates no text and has no adapters; its handler must be gpt_handler."
            )
        return model
    models = [model for model in server.registry.defaults() if "generate" in model.abilities]
    if len(models) != 1:
        names = ", ".join(model.name for model in models) or "none"
        raise BadRequest(f"model is required: the name of the model that the adapter belongs to. There is {names}.")
    return models[0]


async def set_default(server: Server, name: str, version: str) -> OperationResult:
    """Make this version the one for requests that name none."""
    server.set_default(name, version)
    await server.change_saved()
    return OperationResult(200, f'Default version successfully updated for model "{name}" to "{version}"')


async def set_traffic(
    server: Server,
    name: str,
    version: str,
    percent: int | None,
    mirror: int | None = None,
    max_errors: int | None = None,
) -> OperationResult:
    """Give a version a percentage of the requests that name none, or copies of a percentage of them."""
    if max_errors is not None and not percent:
        raise BadRequest("Parameter max_errors needs percent: the part of the requests that it may take away.")
    if percent is None and mirror is None:
        raise BadRequest("Parameter percent is required, or mirror: a whole number from 0 to 100.")
    done = []
    if percent is not None:
        server.set_traffic(name, version, percent, max_errors)
        await server.change_saved()
        done.append(f"{percent} %")
    if mirror is not None:
        server.set_mirror(name, version, mirror)
        done.append(f"copies of {mirror} %")
    text = f'Version "{version}" of model "{name}" gets {" and ".join(done)} of the requests that name no version'
    if max_errors is not None:
        text += f", and none once more than {max_errors} % of its answers are errors of the server"
    return OperationResult(200, text)


def traffic_document(server: Server, name: str, version: str) -> dict[str, Any]:
    """How a version does with its part of the requests, and how its answers to copies differ."""
    model = server.registry.find(name, version)
    percent = WHOLE * server.registry.is_default(model) if model.split is None else model.split.percent_of(model)
    limit = {} if model.error_limit is None else {"maxErrors": model.error_limit.percent}
    reason = {"rolledBack": model.rolled_back} if model.rolled_back else {}
    differences = [*model.mirror.differences]
    return {"percent": percent, **limit, **reason, **results_of(model), "differences": differences}


def results_of(model: Model) -> dict[str, Any]:
    """Answers, errors and latency of a version since it was registered, to compare it with another."""
    times = [histogram.counts for histogram in model.traffic.by_class.values()]
    counts = [sum(each) for each in zip(*times, strict=True)]
    latencies = {name: percentile(counts, share) for name, share in (("p50", 0.5), ("p99", 0.99))}
    document: dict[str, Any] = {
        "answers": model.answers.total(),
        "errors": sum(number for status, number in model.answers.items() if status >= FAILED_FROM) + model.num_broken,
        "latencyMs": {name: None if value is None else round(1000 * value, 2) for name, value in latencies.items()},
    }
    if model.mirror.percent or model.mirror.counts["mirrored"]:
        document["mirror"] = {"percent": model.mirror.percent, **model.mirror.counts}
    return document


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
    if not server.config.strict_calls:
        models = in_hash_order(models)
    on_gpu = any(slot.device is not None for model in models for slot in model.pool.slots)
    gpus = await asyncio.to_thread(gpu_usage) if on_gpu else {}
    if version == "all":
        return [model_document(model, details=details, gpus=gpus) for model in models]
    [model] = models
    document = model_document(model, details=details, gpus=gpus)
    if customized and (metadata := await ask_handler(model)):
        document["customizedMetadata"] = metadata
    return [document]


def slow_requests(server: Server, model: str | None, limit: int) -> dict[str, Any]:
    """The slowest requests of the last hour, with where their time went."""
    models = server.registry.versions(model) if model is not None else [*server.registry]
    return {"requests": to_builtins(slowest_of([each.slow for each in models], limit))}


def in_hash_order(models: Sequence[Model]) -> list[Model]:
    """Versions in the order of the hash table that clients know the list from: by bucket, then by registration."""
    num_buckets = FIRST_BUCKETS
    while len(models) >= num_buckets * 3 // 4:
        num_buckets *= 2
    return sorted(models, key=lambda model: spread_hash(model.version) % num_buckets)


def spread_hash(text: str) -> int:
    """The 31-based hash of 32 bits over UTF-16 units, its upper half mixed into the lower."""
    value = 0
    for unit in memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H"):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value ^ value >> 16


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


def model_document(model: Model, *, details: bool, gpus: Mapping[int, str] = NO_GPUS) -> dict[str, Any]:
    """One model with its settings and workers; `gpus` holds the usage of each device."""
    config = model.config
    is_bounded = config.sequence_max_idle_s > 0
    document: dict[str, Any] = {
        "modelName": model.name,
        "modelVersion": model.version,
        "modelUrl": masked(model.source.url),
        "runtime": model.source.manifest.runtime if model.source.manifest else "python",
        "minWorkers": model.pool.min_workers,
        "maxWorkers": model.pool.max_workers,
        "batchSize": config.batch_size,
        "maxBatchDelay": config.batch_delay_ms,
        "responseTimeout": round(config.response_timeout_s),
        "startupTimeout": round(config.startup_timeout_s),
        "maxRetryTimeoutInSec": round(config.max_retry_s),
        "clientTimeoutInMills": round((config.client_timeout_s or 0) * 1000),
        "parallelType": config.parallel_type,
        "parallelLevel": config.parallel_level,
        "deviceType": "gpu" if any(slot.device is not None for slot in model.pool.slots) else "cpu",
    }
    if not model.is_listed:
        del document["modelUrl"]  # a function of a workflow has no archive of its own
    if config.device_ids:
        document["deviceIds"] = [*config.device_ids]
    document |= {
        "continuousBatching": config.continuous_batching,
        "useJobTicket": config.use_job_ticket,
        "useVenv": config.use_venv,
        "stateful": config.sequence_batching,
        "sequenceMaxIdleMSec": round(config.sequence_max_idle_s * 1000),
        "sequenceTimeoutMSec": round((config.sequence_timeout_s or 0) * 1000) if is_bounded else 0,
        "maxNumSequence": config.max_sequences if is_bounded else 0,
        "maxSequenceJobQueueSize": config.sequence_queue_size if is_bounded else 0,
        **({} if model.split is None else {"trafficPercent": model.split.percent_of(model), **results_of(model)}),
        "loadedAtStartup": model.loaded_at_startup,
        "workers": [worker_document(slot, details=details, gpus=gpus) for slot in model.pool.slots],
        "jobQueueStatus": {
            "remainingCapacity": max(0, model.queue.capacity - model.num_waiting),
            "pendingRequests": model.num_waiting,
        },
    }
    if model.pool.limits.leave_room:
        document["state"] = model.pool.state
    return document


def worker_document(slot: Slot, *, details: bool, gpus: Mapping[int, str] = NO_GPUS) -> dict[str, Any]:
    """One worker, with the cause of its last failure."""
    worker = slot.worker
    pids = worker.pids if worker else [0]  # not -1: `kill` takes that for every process
    started = datetime.fromtimestamp(slot.started_at, UTC)
    document: dict[str, Any] = {
        "id": str(slot.id),
        "startTime": f"{started:%Y-%m-%dT%H:%M:%S}.{started.microsecond // 1000:03d}Z",
        "status": "READY" if slot.is_ready else "UNLOADING",
        "memoryUsage": worker.resident_bytes if worker else 0,
        "pid": pids[0],
        "gpu": slot.device is not None,
        "gpuUsage": "N/A" if slot.device is None else gpus.get(slot.device, f"gpuId::{slot.device}"),
        "state": state_of(slot),
        "restarts": slot.restarts,
    }
    if worker is not None and len(pids) > 1:
        document["ranks"] = [
            {"rank": rank, "pid": pid, "memoryUsage": used}
            for rank, (pid, used) in enumerate(zip(pids, worker.resident_by_rank, strict=True))
        ]
    if worker is not None and worker.node:
        document["node"] = worker.node
    if worker is not None and worker.health:
        document["health"] = worker.health
    if slot.last_exit is not None:
        document["lastFailure"] = failure_document(slot.last_exit, slot.bundle, details=details)
    return document


def state_of(slot: Slot) -> str:
    """The state of a slot in words; `status` has only the two values that existing clients know."""
    if slot.is_abandoned:
        return "failed"
    if slot.worker is None:
        return "waiting to restart"
    if not slot.is_ready and (waiting := slot.worker.waiting):
        return waiting
    return "ready" if slot.is_ready else "loading"


def failure_document(death: WorkerExit, bundle: str, *, details: bool) -> dict[str, Any]:
    """Why a worker failed; `bundle` is the path of its crash bundle, if there is one."""
    document: dict[str, Any] = {"reason": death.reason}
    if death.exit_code is not None and death.signal is None:
        document["exitCode"] = death.exit_code
    if death.signal is not None:
        document["signal"] = death.signal
    if death.out_of_memory:
        document["outOfMemory"] = True
    if death.is_hung:
        document["hung"] = True
    if details and bundle:
        document["bundle"] = bundle
    if details and death.last_lines:
        document["lastLines"] = [*death.last_lines]
    return document


async def run_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Await a change; it goes on if its client disconnects, and a failure is then logged in one line."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(log_failure)
        raise


def log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.info("the client of a management call has disconnected; the call failed: %s", error)
