"""The documents of the console's events: models with their workers and settings, failures, the host."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import to_builtins

from flambeau import __version__
from flambeau.config.model import ModelConfig
from flambeau.frontend import operations
from flambeau.logs.line_formats import masked
from flambeau.metrics.system import resident_bytes
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.serving.workers.host_resources import count_cores
from flambeau.serving.workers.supervisor import Slot
from flambeau.wire.example_requests import is_json

MAX_FAILURES = 20
DEFAULT = "default"
SCALED = "scaled"
HIDDEN = "********"
_USER = re.compile(r"://[^/@\s]+@")


def server_document(server: Server, host: Mapping[str, float]) -> dict[str, Any]:
    """The server and its host; `host` holds the last readings."""
    return {
        "version": __version__,
        "hostname": platform.node(),
        "ready": server.is_ready,
        "host": host,
        "cores": count_cores(),
        "serverBytes": resident_bytes(os.getpid()),
        "missing": [{"name": name, "reason": why} for name, why in server.missing.items()],
        "downloads": [
            {"url": masked(one.url), "bytes": one.num_bytes, "of": one.size_bytes}
            for one in server.store.downloader.running
        ],
        "canRegister": server.config.model_api,
    }


def model_document(model: Model, *, details: bool) -> dict[str, Any]:
    pool = model.pool
    return {
        "name": model.name,
        "version": model.version,
        "state": pool.state,
        "trafficPercent": None if model.split is None else model.split.percent_of(model),
        "mirror": mirror_document(model),
        "handler": model.handler,
        "url": masked(model.source.url),
        "abilities": sorted(model.abilities),
        "example": example_of(model),
        "inputs": [[one.name, one.datatype, one.shape] for one in model.inputs],
        "maxLength": model.max_length,
        "registeredAt": model.registered_at,
        "loadS": pool.load_s,
        "ready": pool.num_ready,
        "wanted": pool.num_wanted,
        "minWorkers": pool.min_workers,
        "maxWorkers": pool.max_workers,
        "waiting": model.num_waiting,
        "inFlight": model.num_in_flight,
        "capacity": model.queue.capacity,
        "restarts": pool.num_restarts,
        "answers": {str(status): count for status, count in model.answers.items()},
        "workers": [worker_document(slot, details=details) for slot in pool.slots],
    }


def mirror_document(model: Model) -> dict[str, Any] | None:
    """Of a version that gets copies of the default's requests, or has got some: their share, and what came of them."""
    mirror = model.mirror
    if not mirror.percent and not mirror.counts["mirrored"]:
        return None
    last = mirror.differences[-1]["difference"] if mirror.differences else ""
    return {"percent": mirror.percent, **mirror.counts, "lastDifference": last}


def example_of(model: Model) -> str:
    """A JSON body that the model accepts; empty if none is known."""
    example = model.config.options.get("example")
    if example is not None:
        return example if isinstance(example, str) else json.dumps(example)
    return model.example if is_json(model.example) else ""


def worker_document(slot: Slot, *, details: bool) -> dict[str, Any]:
    worker = slot.worker
    state: dict[str, Any] = {
        "id": slot.id,
        "state": operations.state_of(slot),
        "pid": worker.pid if worker else 0,
        "device": ", ".join(f"cuda:{device}" for device in slot.devices),
        "bytes": worker.resident_bytes if worker else 0,
        "startedAt": slot.started_at,
        "restarts": slot.restarts,
        "running": sum(batch.remaining for batch in worker.batches) if worker else 0,
    }
    if worker and not slot.is_ready and (lines := worker.last_lines):
        state["line"] = lines[-1]  # of a worker that loads: how far it is
    if worker is not None and worker.health:
        state["health"] = worker.health
    if slot.last_exit is not None:
        state["lastFailure"] = operations.failure_document(slot.last_exit, slot.bundle, details=details)
    return state


def failure_documents(models: Iterable[Model], *, details: bool) -> list[dict[str, Any]]:
    """The last exits of workers, the newest first."""
    exits = [one for model in models for one in model.pool.recent_exits]
    return [
        {
            "time": one.at,
            "model": one.worker.model,
            "version": one.worker.version,
            "worker": one.worker.id,
            **operations.failure_document(one.exit, one.bundle, details=details),
        }
        for one in sorted(exits, key=lambda one: -one.at)[:MAX_FAILURES]
    ]


def output_document(model: Model) -> dict[str, list[str]]:
    """The last lines that each worker printed."""
    return {str(worker.spec.id): [*worker.last_lines] for worker in model.pool.workers}


# ---- settings ----


def _milliseconds(value: float | None) -> str:
    return "none" if value is None else f"{value * 1000:g} ms"


def _seconds(value: float | None) -> str:
    return "none" if value is None else f"{value:g} s"


def _switch(value: bool) -> str:
    return "on" if value else "off"


def _plain(value: object) -> str:
    return "none" if value in (None, "", (), {}) else str(value)


# Key of model-config.yaml, field of ModelConfig, how it is written. The second group is shown where it was set.
MAIN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("minWorkers", "min_workers", _plain),
    ("maxWorkers", "max_workers", _plain),
    ("batchSize", "batch_size", _plain),
    ("maxBatchDelay", "batch_delay_s", _milliseconds),
    ("responseTimeout", "response_timeout_s", _seconds),
    ("startupTimeout", "startup_timeout_s", _seconds),
    ("jobQueueSize", "queue_size", _plain),
)
OTHERS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("clientTimeoutInMills", "client_timeout_s", _milliseconds),
    ("maxRetryTimeoutInSec", "max_retry_s", _seconds),
    ("maxConcurrency", "concurrency", _plain),
    ("workerMemoryLimitMb", "memory_limit_mb", _plain),
    ("quarantineAfterCrashes", "quarantine_after", _plain),
    ("renewAfterRequests", "renew_after", _plain),
    ("renewAboveMb", "renew_above_mb", _plain),
    ("deviceType", "device_type", _plain),
    ("deviceIds", "device_ids", lambda ids: ", ".join(map(str, ids))),
    ("parallelType", "parallel_type", _plain),
    ("parallelLevel", "parallel_level", _plain),
    ("torchrun", "torchrun", json.dumps),
    ("useJobTicket", "use_job_ticket", _switch),
    ("continuousBatching", "continuous_batching", _switch),
    ("sequenceBatching", "sequence_batching", _switch),
    ("sequenceMaxIdleMSec", "sequence_max_idle_s", _milliseconds),
    ("sequenceTimeoutMSec", "sequence_timeout_s", _milliseconds),
    ("maxSequenceJobQueueSize", "sequence_queue_size", _plain),
    ("maxNumSequence", "max_sequences", _plain),
    ("asyncCommunication", "async_communication", _switch),
    ("useVenv", "use_venv", _switch),
    ("targetQueueTimeInMills", "target_queue_s", _milliseconds),
    ("idleTimeoutInSec", "idle_s", _seconds),
    ("scaleToZero", "scales_to_zero", _switch),
    ("hangDetection", "detects_hangs", _switch),
    ("hangTimeoutInSec", "hang_s", _seconds),
    ("responseCacheMb", "response_cache_mb", _plain),
    ("responseCacheInSec", "response_cache_s", _seconds),
    ("responseCacheHeaders", "response_cache_headers", lambda names: ", ".join(names or ())),
    ("envelope", "envelope", _plain),
    ("openai", "openai", _switch),
    ("cluster", "cluster", lambda one: _plain(one and to_builtins(one))),
)
_KNOWN = frozenset(key for key, _, _ in (*MAIN, *OTHERS))


def settings_document(config: ModelConfig, min_workers: int, max_workers: int) -> list[list[str]]:
    """[key, value, origin] of each setting: the main ones, and the others that were set; then the handler's own.

    The bounds of the workers are those that hold now: a scale call may have changed them.
    """
    scaled = {"min_workers": min_workers, "max_workers": max_workers}
    rows = []
    for key, name, write in (*MAIN, *OTHERS):
        value = scaled.get(name, getattr(config, name))
        origin = config.origins.get(name, DEFAULT) if value == getattr(config, name) else SCALED
        if origin != DEFAULT or (key, name, write) in MAIN:
            rows.append([key, write(value), origin])
    return [*rows, *([key, value, "model-config.yaml"] for key, value in handler_options(config.options))]


def handler_options(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The options that the server leaves to the handler, one level deep."""
    found: list[tuple[str, str]] = []
    for key, value in options.items():
        if key in _KNOWN or key == "example":
            continue
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        named = [(f"{key}.{name}".rstrip("."), one) for name, one in inner]
        found += [(name, HIDDEN if is_secret(name) else masked(_text(one))) for name, one in named]
    return found


def is_secret(key: str) -> bool:
    """Whether a handler's option may hold what no page should show; `max_new_tokens` does not."""
    return key.lower().endswith(("token", "secret", "password", "key", "credentials"))


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = _USER.sub("://***@", text)
    return text if len(text) <= 200 else f"{text[:200]}…"
