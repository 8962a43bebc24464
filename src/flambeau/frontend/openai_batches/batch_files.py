"""The files of a batch: the requests that it reads, the results that it appends, and its own record."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgspec

MAX_REQUESTS = 50_000
MAX_ERRORS = 20  # of a file whose lines are invalid
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
RUNNING = ("in_progress", "finalizing", "cancelling")

Document = dict[str, Any]


class BatchRequest(msgspec.Struct, frozen=True):
    """One line of the input."""

    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch as OpenAI's API has it, and whose it is."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: str = "in_progress"
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = []

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING

    def document(self) -> Document:
        document: Document = {"object": "batch", **msgspec.to_builtins(self)}
        for name in ("owner", "total", "completed", "failed"):
            del document[name]
        document["errors"] = {"object": "list", "data": self.errors} if self.errors else None
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        return {**document, "request_counts": counts}


_decode_line = msgspec.json.Decoder(BatchRequest).decode


def read_requests(content: bytes, endpoint: str) -> tuple[list[BatchRequest], list[Document]]:
    """The requests of an input file, and what is wrong with its lines."""
    requests: list[BatchRequest] = []
    problems: list[Document] = []
    seen: set[str] = set()
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        if len(requests) >= MAX_REQUESTS:
            problems.append(problem("too_many_tasks", None, f"the file has more than {MAX_REQUESTS} requests"))
        elif isinstance(found := read_line(line, endpoint, seen), str):
            problems.append(problem("invalid_line", number, found))
        else:
            requests.append(found)
            seen.add(found.custom_id)
        if len(problems) >= MAX_ERRORS or (problems and problems[-1]["code"] == "too_many_tasks"):
            break
    if not requests and not problems:
        problems.append(problem("empty_file", None, "the file has no requests"))
    return requests, problems


def read_line(line: bytes, endpoint: str, seen: set[str]) -> BatchRequest | str:
    """A request, or what is wrong with its line."""
    try:
        request = _decode_line(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"it is no request: {error}; expected custom_id, method, url and body"
    if request.method != "POST":
        return f"its method is {request.method[:20]!r}; it must be POST"
    if request.url != endpoint:
        return f"its url is {request.url[:80]!r}; it must be the batch's endpoint, {endpoint}"
    if request.custom_id in seen:
        return f"its custom_id {request.custom_id[:80]!r} is that of another line"
    if request.body.get("stream"):
        return "its body has stream: true; a batch has whole replies"
    return request


def problem(code: str, line: int | None, message: str) -> Document:
    text = message if line is None else f"line {line}: {message}"
    return {"code": code, "line": line, "message": text, "param": None}


class ResultFile:
    """Results of a batch, one a line. What a server that stopped has written is kept, a torn last line is not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    def done(self) -> set[str]:
        """The custom ids of the results that are there."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return set()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        return {msgspec.json.decode(line)["custom_id"] for line in whole.splitlines()}

    def append(self, result: Document) -> None:
        with self._lock, self.path.open("ab") as stream:
            stream.write(msgspec.json.encode(result) + b"\n")
