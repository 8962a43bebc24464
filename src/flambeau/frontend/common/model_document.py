"""A model as `describe` shows it. The order of the first fields is the one existing clients know."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from flambeau.logs.line_formats import masked
from flambeau.metrics.system import resident_bytes
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.model import Model
from flambeau.serving.workers.host_resources import resident_bytes_of
from flambeau.serving.workers.supervisor import Slot

NO_GPUS: Mapping[int, str] = MappingProxyType({})


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
    pids = worker.pids if worker else [-1]
    started = datetime.fromtimestamp(slot.started_at, UTC)
    document: dict[str, Any] = {
        "id": str(slot.id),
        "startTime": f"{started:%Y-%m-%dT%H:%M:%S}.{started.microsecond // 1000:03d}Z",
        "status": "READY" if slot.is_ready else "UNLOADING",
        "memoryUsage": resident_bytes_of(pids),
        "pid": pids[0],
        "gpu": slot.device is not None,
        "gpuUsage": "N/A" if slot.device is None else gpus.get(slot.device, f"gpuId::{slot.device}"),
        "state": state_of(slot),
        "restarts": slot.restarts,
    }
    if len(pids) > 1:
        document["ranks"] = [
            {"rank": rank, "pid": pid, "memoryUsage": resident_bytes(pid)} for rank, pid in enumerate(pids)
        ]
    if slot.last_exit is not None:
        document["lastFailure"] = failure_document(slot.last_exit, details=details)
    return document


def state_of(slot: Slot) -> str:
    """The state of a slot in words; `status` has only the two values that existing clients know."""
    if slot.is_abandoned:
        return "failed"
    if slot.worker is None:
        return "waiting to restart"
    return "ready" if slot.is_ready else "loading"


def failure_document(death: WorkerExit, *, details: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"reason": death.reason}
    if death.exit_code is not None and death.signal is None:
        document["exitCode"] = death.exit_code
    if death.signal is not None:
        document["signal"] = death.signal
    if death.out_of_memory:
        document["outOfMemory"] = True
    if details and death.last_lines:
        document["lastLines"] = [*death.last_lines]
    return document
