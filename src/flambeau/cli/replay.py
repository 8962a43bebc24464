"""`flambeau replay`: sends the requests of a crash bundle to a fresh worker, and tells whether it dies again."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from flambeau.cli.output import print_json, print_table
from flambeau.config.model import ModelConfig
from flambeau.config.server import MetricsConfig, ServerConfig
from flambeau.config.settings import DEFAULTS
from flambeau.errors import ConfigError, FlambeauError, WorkersFailed
from flambeau.serving.crash_bundles import default_folder, list_bundles, read_bundle
from flambeau.serving.job import Job, ReplyCollector, RequestBody
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.serving.workers.health import MIN_BATCHES

DIED, NOT_TRIED = 1, 2  # exit status
POLL_S = 0.02
MAX_SHOWN = 500  # characters of a reply


def replay(
    bundle: Path | None,
    payload: Path | None,
    content_type: str | None,
    *,
    model: Path | None,
    folder: Path | None,
    list_all: bool,
    as_json: bool,
) -> None:
    """List the bundles, or replay one and exit with the status of the outcome."""
    folder = folder or default_folder()
    if list_all or bundle is None:
        show_bundles(folder, as_json=as_json)
        return
    try:
        path = bundle if bundle.exists() else folder / bundle
        document = read_bundle(path)
        requests = to_requests(path, document, payload, content_type)
        place = model or Path(document["model"]["path"])
        if not place.exists():
            raise ConfigError(f"the model is no longer at {place}; name its place with --model PATH")
        outcome = asyncio.run(run_again(document, place, requests))
    except (FlambeauError, OSError, KeyError) as error:
        words = f"{path / 'bundle.json'} has no {error}" if isinstance(error, KeyError) else str(error)
        print(f"flambeau: {words}", file=sys.stderr)
        raise typer.Exit(NOT_TRIED) from None
    if as_json:
        print_json({"bundle": str(path), "before": document["reason"], **outcome})
    else:
        show_outcome(document, outcome)
    if outcome["died"]:
        raise typer.Exit(DIED)


def show_bundles(folder: Path, *, as_json: bool) -> None:
    rows = [(path, read_bundle(path)) for path in list_bundles(folder)]
    if as_json:
        print_json([{"path": str(path), **document} for path, document in rows])
    elif not rows:
        print(f"no crash bundles in {folder}; --folder names that of a server with a log folder or --crash-folder")
    else:
        cells = [
            [
                path.name,
                document["kind"],
                str(len(document["requests"])),
                "yes" if any(request["payload"] for request in document["requests"]) else "no",
                document["reason"].partition("\n")[0],
            ]
            for path, document in rows
        ]
        print_table(["bundle", "kind", "requests", "payload", "reason"], cells)


def to_requests(
    path: Path, document: dict[str, Any], payload: Path | None, content_type: str | None
) -> list[dict[str, Any]]:
    """The requests to send, each with its `body`; empty if the worker held none. Raises ConfigError without a body."""
    recorded = document["requests"]
    if payload is not None:
        known = recorded[0] if recorded else {"kind": "predict", "contentType": "", "sha256": None}
        body = payload.read_bytes()
        digest = hashlib.sha256(body).hexdigest()
        matching = [request for request in recorded if request["sha256"] == digest]
        if recorded and not matching:
            print(f"{payload} is another request than the recorded ones: sha256 {digest}", file=sys.stderr)
        known = matching[0] if matching else known
        kind = content_type or known["contentType"] or mimetypes.guess_type(payload.name)[0]
        return [{**known, "body": body, "headers": [["content-type", kind or "application/octet-stream"]]}]
    stored = [request for request in recorded if request["payload"]]
    if recorded and not stored:
        first = recorded[0]
        raise ConfigError(
            f"the bundle holds no request, only its fingerprint: {first['contentType'] or 'no content type'}, "
            f"{first['sizeInBytes']} bytes, sha256 {first['sha256']}. Give the request with --payload FILE, or serve "
            "with --crash-payloads"
        )
    return [{**request, "body": (path / request["payload"]).read_bytes()} for request in stored]


async def run_again(document: dict[str, Any], place: Path, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Serve the model with one worker, send the requests together, and report what happened."""
    recorded = document["model"]
    config = ModelConfig(
        response_timeout_s=recorded["responseTimeout"],
        startup_timeout_s=recorded["startupTimeout"],
        detects_hangs=recorded["hangDetection"],
        hang_s=recorded["hangTimeoutInSec"],
    )
    settings: dict[str, Any] = {"min_workers": 1, "max_workers": 1, "max_retry_s": 0, "envelope": recorded["envelope"]}
    if len(requests) > 1:
        settings |= {"batch_size": max(len(requests), recorded["batchSize"]), "batch_delay_s": 0.1}
    async with Server(replay_config(decode_input=recorded["decodeInput"])) as server:
        try:
            model = await server.register(
                place.name,
                path=place,
                name=recorded["name"],
                handler=recorded["handler"],
                config=config,
                overrides=settings,
            )
        except WorkersFailed as error:
            return {"died": True, "reason": error.cause or str(error), "replies": []}
        if recorded["usualBatchInSec"] is not None:  # else an endless loop would only end by the response timeout
            for _ in range(MIN_BATCHES):
                model.step_times.add(recorded["usualBatchInSec"])
        return await send(model, [to_job(request) for request in requests])


def replay_config(*, decode_input: bool) -> ServerConfig:
    """Settings without crash bundles, measurements and retries."""
    return replace(
        DEFAULTS,
        crash_bundles=0,
        measure=MetricsConfig(system=False),
        error_details=True,
        drain_timeout_s=1,
        decode_input_request=decode_input,
    )


def to_job(request: dict[str, Any]) -> Job:
    fields = request.get("fields")
    return Job(
        ReplyCollector(),
        request_id=request.get("id") or str(uuid.uuid4()),
        headers=[(name, value) for name, value in request["headers"]],
        body=RequestBody(request["body"]),
        arrived=asyncio.get_running_loop().time(),
        kind=request["kind"],
        url_path=request.get("urlPath", ""),
        query=request.get("query", ""),
        envelope=request.get("envelope", ""),
        fields=None if fields is None else [(name, size) for name, size in fields],
    )


async def send(model: Model, jobs: Sequence[Job]) -> dict[str, Any]:
    """Wait until all are answered or the worker has died once."""
    for job in jobs:
        model.add(job)
    replies = [job.receiver.done for job in jobs if isinstance(job.receiver, ReplyCollector)]
    while not all(reply.done() for reply in replies) and not [*model.pool.recent_exits]:
        await asyncio.sleep(POLL_S)
    exits = [*model.pool.recent_exits]
    for job in jobs:
        job.cancel()
    return {
        "died": bool(exits),
        "reason": exits[0].exit.cause if exits else "",
        "replies": [answer_of(reply) for reply in replies if reply.done()],
    }


def answer_of(reply: asyncio.Future[bytes]) -> dict[str, str]:
    """A reply or an error as text."""
    if (error := reply.exception()) is not None:
        return {"error": str(error)}
    return {"reply": reply.result()[:MAX_SHOWN].decode("utf-8", "replace")}


def show_outcome(document: dict[str, Any], outcome: dict[str, Any]) -> None:
    print(f"before: {document['reason']}")
    if outcome["died"]:
        print(f"now: it dies again: {outcome['reason']}")
    elif not document["requests"] and not outcome["replies"]:
        print("now: the model loads")
    else:
        print("now: it does not die")
    for reply in outcome["replies"]:
        print(f"  reply: {reply['reply']}" if "reply" in reply else f"  error: {reply['error']}")
