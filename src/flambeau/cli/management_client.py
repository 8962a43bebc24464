"""`flambeau models …`: calls the management API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flambeau.cli.api_client import RequestFailed, call
from flambeau.cli.output import print_json, print_table
from flambeau.errors import ConfigError


def ls(url: str, *, as_json: bool) -> None:
    """List all versions of all models."""
    found: list[dict[str, Any]] = []
    token: str | None = None
    tokens: set[str] = set()
    while True:
        page = call(url, "GET", "/models", next_page_token=token)
        found += page["models"]
        token = page.get("nextPageToken")
        if token is None:
            break
        if token in tokens or not page["models"]:
            raise ConfigError(f"the list of models at {url} has no end; is it a Flambeau server?")
        tokens.add(token)
    documents = [document for model in found for document in call(url, "GET", path_of(model["modelName"], "all"))]
    if as_json:
        print_json(documents)
        return
    has_shares = any("trafficPercent" in document for document in documents)
    defaults = default_versions(url, documents)
    rows = [
        [
            document["modelName"],
            f"{document['modelVersion']}{defaults.get((document['modelName'], document['modelVersion']), '')}",
            *([share_of(document)] if has_shares else ()),
            f"{sum(worker['status'] == 'READY' for worker in document['workers'])}/{document['minWorkers']}",
            str(document["batchSize"]),
            str(document["jobQueueStatus"]["pendingRequests"]),
            document["modelUrl"],
        ]
        for document in documents
    ]
    shares = ["TRAFFIC"] if has_shares else []
    print_table(["MODEL", "VERSION", *shares, "READY", "BATCH", "WAITING", "FROM"], rows)


def default_versions(url: str, documents: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], str]:
    """The words behind the default version of each model that has several versions."""
    times = Counter(document["modelName"] for document in documents)
    several = [name for name, number in times.items() if number > 1]
    return {(name, call(url, "GET", path_of(name, None))[0]["modelVersion"]): " (default)" for name in several}


def share_of(document: Mapping[str, Any]) -> str:
    """The share of a version; empty where versions do not share requests."""
    return f"{document['trafficPercent']} %" if "trafficPercent" in document else ""


def describe(url: str, name: str, version: str | None, *, as_json: bool) -> None:
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


def register(url: str, source: str, *, workers: int, wait: bool, overrides: Mapping[str, Any], as_json: bool) -> None:
    """Register a model. A name is one in the server's store; a path is that very file, or the server refuses it."""
    if "://" not in source and "/" in source and Path(source).exists():
        source = str(Path(source).resolve())
    try:
        answer = call(url, "POST", "/models", url=source, initial_workers=workers, synchronous=wait, **overrides)
    except RequestFailed as error:
        if error.status == 404 and "/" not in source and Path(source).exists():
            raise ConfigError(f"{error}. There is a {source} here; to register that one, write ./{source}") from None
        raise
    print_status(answer, as_json=as_json)


def scale(url: str, name: str, version: str | None, workers: int, *, wait: bool, as_json: bool) -> None:
    answer = call(url, "PUT", path_of(name, version), min_worker=workers, max_worker=workers, synchronous=wait)
    print_status(answer, as_json=as_json)


def rm(url: str, name: str, version: str | None, *, as_json: bool) -> None:
    print_status(call(url, "DELETE", path_of(name, version)), as_json=as_json)


def set_default(url: str, name: str, version: str, *, as_json: bool) -> None:
    print_status(call(url, "PUT", path_of(name, version) + "/set-default"), as_json=as_json)


def set_traffic(
    url: str, name: str, version: str, percent: int | None, mirror: int | None, max_errors: int | None, *, as_json: bool
) -> None:
    path = path_of(name, version) + "/traffic"
    answer = call(url, "PUT", path, percent=percent, mirror=mirror, max_errors=max_errors)
    print_status(answer, as_json=as_json)


def traffic(url: str, name: str, version: str | None, *, as_json: bool) -> None:
    """The versions of a model side by side, or those of one: where its answers to copies differ."""
    versions = [version] if version else [one["modelVersion"] for one in call(url, "GET", path_of(name, "all"))]
    found = {one: call(url, "GET", path_of(name, one) + "/traffic") for one in versions}
    if as_json:
        print_json(found)
        return
    rows = []
    for one, document in found.items():
        answers, errors, times = document["answers"], document["errors"], document["latencyMs"]
        shares = [f"{document['percent']} %", str(answers), f"{errors} ({errors / max(1, answers):.2%})"]
        rows.append([one, *shares, *("-" if times[name] is None else f"{times[name]:g} ms" for name in ("p50", "p99"))])
    print_table(["VERSION", "TRAFFIC", "ANSWERS", "ERRORS", "P50", "P99"], rows)
    for one, document in found.items():
        if reason := document.get("rolledBack"):
            print(f"\n{one} gets no requests any more: {reason}")
        elif "maxErrors" in document:
            print(
                f"\n{one} gets no more once more than {document['maxErrors']} % of its answers are errors of the server"
            )
        if mirror := document.get("mirror"):
            counts = ", ".join(f"{count} {result}" for result, count in mirror.items() if result != "percent")
            print(f"\n{one} gets copies of {mirror['percent']} %: {counts}")
        for difference in document["differences"]:
            print(f"  {difference['requestId']}  {difference['difference']}")


def load_adapter(url: str, name: str, path: str, model: str | None, *, as_json: bool) -> None:
    """Load a LoRA adapter; the server reads the folder."""
    folder = str(Path(path).resolve()) if Path(path).exists() else path
    answer = call(url, "POST", "/v1/load_lora_adapter", lora_name=name, lora_path=folder, model=model)
    print_status(answer, as_json=as_json)


def unload_adapter(url: str, name: str, model: str | None, *, as_json: bool) -> None:
    answer = call(url, "POST", "/v1/unload_lora_adapter", lora_name=name, model=model)
    print_status(answer, as_json=as_json)


def slow(url: str, model: str | None, limit: int, *, as_json: bool) -> None:
    """The slowest requests of the last hour."""
    document = call(url, "GET", "/slow", model=model, limit=limit)
    if as_json:
        print_json(document)
        return
    if not document["requests"]:
        print("no requests in the last hour")
    for request in document["requests"]:
        print("\n".join(slow_lines(request)))


def slow_lines(request: Mapping[str, Any]) -> list[str]:
    """One request for people: its parts from the longest to the shortest, and what else happened."""
    named = f"{request['model']} {request['version']}"
    status = request["status"] or "cancelled"
    lines = [f"{request['total_ms']:.1f} ms  {named}  {request['arrived']}  {status}  {request['request_id']}"]
    parts = sorted(request["parts"], key=lambda part: -part["ms"])
    shown = [f"{part['name']} {part['ms']:.1f}" for part in parts if part["ms"] >= 0.05]
    lines.append(f"    {', '.join(shown)} ms")
    company = len(request["shared_with"])
    worker = f"    {request['worker']}, batch of {request['batch_size']}"
    if company:
        ids = ", ".join(request["shared_with"][:3]) + (", …" if company > 3 else "")
        worker += f", with {company} other request{'s' if company > 1 else ''} ({ids})"
    lines.append(worker)
    if made := request.get("generation"):
        lines.append(
            f"    {made['prompt_tokens']} prompt tokens ({made['cached_tokens']} cached), {made['output_tokens']} "
            f"generated, first after {made['first_token_ms']:.1f} ms"
        )
    lines += [
        f"    {event['what']}: after {event['after_ms']:.1f} ms, for {event['ms']:.1f} ms"
        for event in request["meanwhile"]
    ]
    return lines


def path_of(name: str, version: str | None) -> str:
    return "/models/" + "/".join(quote(part, safe="") for part in (name, version) if part)


def print_status(answer: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        print(answer["status"])
