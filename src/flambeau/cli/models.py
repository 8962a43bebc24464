"""`flambeau models …`: the management API from a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from flambeau.cli.api_client import call


def ls(url: str, *, as_json: bool) -> None:
    """List every model, page by page."""
    found: list[dict[str, Any]] = []
    token: str | None = None
    while True:
        page = call(url, "GET", "/models", next_page_token=token)
        found += page["models"]
        token = page.get("nextPageToken")
        if token is None:
            break
    documents = [document for model in found for document in call(url, "GET", path_of(model["modelName"], "all"))]
    if as_json:
        print_json(documents)
        return
    rows = [
        [
            document["modelName"],
            document["modelVersion"],
            f"{sum(worker['status'] == 'READY' for worker in document['workers'])}/{document['minWorkers']}",
            str(document["batchSize"]),
            str(document["jobQueueStatus"]["pendingRequests"]),
            document["modelUrl"],
        ]
        for document in documents
    ]
    print_table(["MODEL", "VERSION", "READY", "BATCH", "WAITING", "FROM"], rows)


def describe(url: str, name: str, version: str | None, *, as_json: bool) -> None:
    """Show one model."""
    documents = call(url, "GET", path_of(name, version))
    if as_json:
        print_json(documents)
        return
    for document in documents:
        workers = document.pop("workers")
        document.pop("jobQueueStatus")
        print_table(["SETTING", "VALUE"], [[key, str(value)] for key, value in document.items()])
        print()
        rows = [
            [w["id"], w["state"], str(w["pid"]), f"{w['memoryUsage'] >> 20} MB", str(w["restarts"])] for w in workers
        ]
        print_table(["WORKER", "STATE", "PID", "MEMORY", "RESTARTS"], rows)
        for worker in workers:
            if failure := worker.get("lastFailure"):
                print(f"\nworker {worker['id']}: {failure['reason']}")
                print("\n".join(f"  | {line}" for line in failure.get("lastLines", [])))


def register(url: str, source: str, *, workers: int, wait: bool, wishes: Mapping[str, Any], as_json: bool) -> None:
    """Register a model."""
    say(call(url, "POST", "/models", url=source, initial_workers=workers, synchronous=wait, **wishes), as_json=as_json)


def scale(url: str, name: str, version: str | None, workers: int, *, wait: bool, as_json: bool) -> None:
    """Change the number of workers."""
    answer = call(url, "PUT", path_of(name, version), min_worker=workers, max_worker=workers, synchronous=wait)
    say(answer, as_json=as_json)


def rm(url: str, name: str, version: str | None, *, as_json: bool) -> None:
    """Unregister a model."""
    say(call(url, "DELETE", path_of(name, version)), as_json=as_json)


def set_default(url: str, name: str, version: str, *, as_json: bool) -> None:
    """Make a version the default one."""
    say(call(url, "PUT", path_of(name, version) + "/set-default"), as_json=as_json)


def path_of(name: str, version: str | None) -> str:
    """The path of a model, or of one of its versions."""
    return "/models/" + "/".join(quote(part, safe="") for part in (name, version) if part)


def say(answer: Mapping[str, Any], *, as_json: bool) -> None:
    """Print a status answer."""
    if as_json:
        print_json(answer)
    else:
        print(answer["status"])


def print_json(document: Any) -> None:
    """Print JSON for another program."""
    print(json.dumps(document, indent=2))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns: readable, and easy to cut."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
