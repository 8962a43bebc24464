"""FilesApi: /v1/files and /v1/batches."""

# ruff: noqa: RUF009  (the defaults are dataclass fields that carry their FieldType)

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.errors import BadRequest, InvalidField, ObjectNotFound
from flambeau.frontend.authorization import Keys
from flambeau.frontend.http.bodies import read_form, take_bytes
from flambeau.frontend.http.errors import respond_json
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openapi import OPENAI_ERROR, WHOLE, Operation, Parameter, Schema
from flambeau.frontend.http.router import ANYTHING, Endpoint, Router, query_of, unknown_path
from flambeau.frontend.openai.errors import not_allowed, not_found
from flambeau.frontend.openai.fields import OBJECT, TEXT, one_of
from flambeau.frontend.openai.requests import Object, optional, read_request, registered, request_schema, required
from flambeau.frontend.openai_batches.batch_files import ENDPOINTS, BatchRecord
from flambeau.frontend.openai_batches.file_store import FileStore, StoredFile
from flambeau.frontend.openai_batches.runner import BatchJobs, metadata_of
from flambeau.serving.server import Server

WINDOW_S = 24 * 3600
MAX_NAME = 255
MAX_LISTED = 10_000
NO_FOLDER = "This server keeps no files; start it with --files-folder PATH to have /v1/files and /v1/batches."


@registered
@dataclass(slots=True, kw_only=True)
class CreateBatchRequest:
    """`POST /v1/batches`."""

    input_file_id: str = required(TEXT)
    endpoint: str = required(one_of(*ENDPOINTS))
    completion_window: str = required(one_of("24h"))
    metadata: Object | None = optional(OBJECT)


class FilesApi:
    """Files of clients, and batches of the requests in them."""

    def __init__(self, server: Server, keys: Keys | None, v1: Endpoint, folder: Path | None) -> None:
        self._files: FileStore | None = None
        self._runner: BatchJobs | None = None
        if folder is not None:
            self._files = FileStore(folder)
            router = Router({"v1": v1, ANYTHING: unknown_path}, style=server.config.error_style)
            self._runner = BatchJobs(server, router, self._files, folder, keys)

    def start(self) -> None:
        """Go on with the batches of an earlier run, on the event loop that runs."""
        if self._runner is not None:
            self._runner.load()

    def files(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        """/v1/files, /v1/files/{id} and /v1/files/{id}/content."""
        if self._files is None:
            raise BadRequest(NO_FOLDER)
        match exchange.method, segments[2:]:
            case "OPTIONS", _:
                exchange.respond(200, b"")  # every response has the CORS headers
            case "POST", []:
                return self._upload(exchange, self._files)
            case "GET", []:
                found = [file.document() for file in self._files.of(exchange.key_name)]
                purpose = query_of(exchange).get("purpose")
                respond_list(exchange, [file for file in found if purpose in (None, file["purpose"])])
            case "GET", [id]:
                respond_json(exchange, 200, self._file(exchange, id).document())
            case "GET", [id, "content"]:
                return self._content(exchange, self._files, self._file(exchange, id))
            case "DELETE", [id]:
                return self._delete(exchange, self._files, self._file(exchange, id))
            case _, []:
                not_allowed(exchange, "GET", "POST")
            case _, [_]:
                not_allowed(exchange, "GET", "DELETE")
            case _, [_, "content"]:
                not_allowed(exchange, "GET")
            case _:
                not_found(exchange)
        return None

    def _file(self, exchange: Exchange, id: str) -> StoredFile:
        assert self._files is not None
        found = self._files.get(id, exchange.key_name)
        if found is None:
            raise ObjectNotFound(f"There is no file {id[:100]!r}.")
        return found

    async def _upload(self, exchange: Exchange, files: FileStore) -> None:
        content_type, body = exchange.header("content-type") or "", take_bytes(exchange)
        fields, filename, content = await asyncio.to_thread(read_upload, content_type, body)
        if (purpose := fields.get("purpose")) != "batch":
            raise InvalidField("purpose", f"purpose must be batch, not {purpose!r}: files are for batches here")
        stored = await asyncio.to_thread(
            files.add,
            content,
            filename=filename[:MAX_NAME],
            purpose=purpose,
            owner=exchange.key_name,
            now=time.time(),
        )
        respond_json(exchange, 200, stored.document())

    async def _content(self, exchange: Exchange, files: FileStore, file: StoredFile) -> None:
        content = await asyncio.to_thread(files.read, file)
        exchange.respond(200, content, (("content-type", "application/octet-stream"),))

    async def _delete(self, exchange: Exchange, files: FileStore, file: StoredFile) -> None:
        assert self._runner is not None
        if any(batch.input_file_id == file.id and batch.is_running for batch in self._runner.records.values()):
            raise BadRequest(f"The file {file.id} is the input of a batch that runs; cancel the batch first.")
        await asyncio.to_thread(files.delete, file)
        respond_json(exchange, 200, {"id": file.id, "object": "file", "deleted": True})

    # ---- batches ----

    def batches(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        """/v1/batches, /v1/batches/{id} and /v1/batches/{id}/cancel."""
        if self._runner is None:
            raise BadRequest(NO_FOLDER)
        match exchange.method, segments[2:]:
            case "OPTIONS", _:
                exchange.respond(200, b"")  # every response has the CORS headers
            case "POST", []:
                return self._create(exchange, self._runner)
            case "GET", []:
                own = [batch for batch in self._runner.records.values() if batch.owner == exchange.key_name]
                newest = sorted(own, key=lambda batch: batch.created_at, reverse=True)
                respond_list(exchange, [batch.document() for batch in newest])
            case "GET", [id]:
                respond_json(exchange, 200, self._batch(exchange, id).document())
            case "POST", [id, "cancel"]:
                return self._cancel(exchange, self._runner, self._batch(exchange, id))
            case _, []:
                not_allowed(exchange, "GET", "POST")
            case _, [_]:
                not_allowed(exchange, "GET")
            case _, [_, "cancel"]:
                not_allowed(exchange, "POST")
            case _:
                not_found(exchange)
        return None

    def _batch(self, exchange: Exchange, id: str) -> BatchRecord:
        assert self._runner is not None
        found = self._runner.records.get(id)
        if found is None or found.owner != exchange.key_name:
            raise ObjectNotFound(f"There is no batch {id[:100]!r}.")
        return found

    async def _create(self, exchange: Exchange, runner: BatchJobs) -> None:
        request = read_request(take_bytes(exchange), CreateBatchRequest)
        if self._files is None or self._files.get(request.input_file_id, exchange.key_name) is None:
            text = f"input_file_id {request.input_file_id[:100]!r} is no file of yours; upload it to /v1/files first"
            raise InvalidField("input_file_id", text)
        now = int(time.time())
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            owner=exchange.key_name,
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            created_at=now,
            expires_at=now + WINDOW_S,
            metadata=None if request.metadata is None else metadata_of(request.metadata),
        )
        await runner.add(record)
        respond_json(exchange, 200, record.document())

    async def _cancel(self, exchange: Exchange, runner: BatchJobs, record: BatchRecord) -> None:
        if not record.is_running:
            raise BadRequest(f"The batch {record.id} is {record.status} already.")
        await runner.cancel(record)
        respond_json(exchange, 200, record.document())


def respond_list(exchange: Exchange, found: list[dict[str, Any]]) -> None:
    """A page of a list, in OpenAI's format: `limit` entries behind the one that `after` names."""
    query = query_of(exchange)
    limit = query.get("limit", "")
    number = min(MAX_LISTED, int(limit)) if limit.isdecimal() and int(limit) else MAX_LISTED
    after = query.get("after")
    start = next((i + 1 for i, entry in enumerate(found) if entry["id"] == after), 0)
    page = found[start : start + number]
    ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    respond_json(exchange, 200, {"object": "list", "data": page, **ids, "has_more": start + number < len(found)})


def read_upload(content_type: str, body: bytes) -> tuple[Mapping[str, str], str, bytes]:
    """The fields of a form with a file, and the file's name and content; blocks."""
    form = read_form(content_type, body)
    if "file" not in form.files:
        raise InvalidField("file", "file is required: the file itself, as a part of the form with a filename")
    filename, content = form.files["file"]
    return {name: values[-1] for name, values in form.fields.items()}, filename, content


# ---- the API description ----

STATUSES = (400, 401, 404)
LISTED = (
    Parameter("limit", WHOLE, f"The most entries of a page; {MAX_LISTED} by default."),
    Parameter("after", {"type": "string"}, "The id of the last entry of the page before."),
)
UPLOAD: Schema = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "Requests as lines of JSON."},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
}


def _operation(method: str, path: str, operation_id: str, summary: str, **more: Any) -> Operation:
    given = {"errors": STATUSES, **more}
    return Operation(path=path, method=method, id=operation_id, summary=summary, error=OPENAI_ERROR, **given)


OPERATIONS = [
    _operation(
        "post",
        "/v1/files",
        "createFile",
        "Upload a file (OpenAI).",
        body={"multipart/form-data": UPLOAD},
        errors=(*STATUSES, 413),
    ),
    _operation(
        "get",
        "/v1/files",
        "listFiles",
        "List your files (OpenAI).",
        query=[*LISTED, Parameter("purpose", {"type": "string"}, "Only files of this purpose.")],
    ),
    _operation("get", "/v1/files/{file_id}", "retrieveFile", "Describe a file (OpenAI)."),
    _operation("delete", "/v1/files/{file_id}", "deleteFile", "Delete a file (OpenAI)."),
    _operation(
        "get",
        "/v1/files/{file_id}/content",
        "downloadFile",
        "The content of a file (OpenAI).",
        answers={200: ("The content", {"type": "string", "format": "binary"})},
        content_type="application/octet-stream",
    ),
    _operation(
        "post",
        "/v1/batches",
        "createBatch",
        "Run the requests of a file (OpenAI).",
        body={"application/json": request_schema(CreateBatchRequest)},
    ),
    _operation("get", "/v1/batches", "listBatches", "List your batches (OpenAI).", query=LISTED),
    _operation("get", "/v1/batches/{batch_id}", "retrieveBatch", "The state of a batch (OpenAI)."),
    _operation("post", "/v1/batches/{batch_id}/cancel", "cancelBatch", "Cancel a batch (OpenAI)."),
]
