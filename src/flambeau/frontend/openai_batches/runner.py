"""BatchJobs: answers the requests of batches, a few at a time and at low priority; it goes on after a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from flambeau.errors import ModelNotFound
from flambeau.frontend.authorization import Keys
from flambeau.frontend.http.exchange import Exchange, Header, new_request_id
from flambeau.frontend.http.router import Router
from flambeau.frontend.openai.models import find_model
from flambeau.frontend.openai_batches.batch_files import (
    BatchRecord,
    BatchRequest,
    Document,
    ResultFile,
    problem,
    read_requests,
)
from flambeau.frontend.openai_batches.file_store import FileStore, write_atomically
from flambeau.serving.job import RequestBody
from flambeau.serving.server import Server
from flambeau.serving.tenants import Tenant
from flambeau.wire.messages import header

logger = logging.getLogger(__name__)

MAX_AT_A_TIME = 64  # requests of one batch
PLACES_SHARE = 2  # of the places of a model, a batch takes at most one in so many
DEFAULT_AT_A_TIME = 4  # where a model has no places
MAX_FAILURES = 3  # a request is repeated so often where the server was unavailable
BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
START_POLL_S = 0.2


class NoClientConnection:
    """The connection of an exchange without a client."""

    common = b""
    is_draining = False
    counts_bytes = False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        pass

    def on_answer(self, exchange: Exchange, status: int) -> None:
        pass

    def on_finished(self, exchange: Exchange) -> None:
        pass


class BatchExchange(Exchange):
    """One request of a batch; `done` gets its status, body and headers."""

    __slots__ = ("done",)

    def __init__(self, path: str, body: bytes, tenant: Tenant | None) -> None:
        super().__init__(
            NoClientConnection(), "POST", path, [("content-type", "application/json")], "1.1", time.monotonic()
        )
        self.body = RequestBody(body)
        self.request_id = new_request_id()
        self.priority = "low"
        self.tenant = tenant
        self.done: asyncio.Future[tuple[int, bytes, list[Header]]] = asyncio.get_running_loop().create_future()

    def respond(self, status: int, body: bytes, headers: Iterable[Header] = (), phrase: str = "") -> None:
        self.is_started, self.status = True, status
        if not self.done.done():
            self.done.set_result((status, body, [*headers]))
        self._finish()


class BatchJobs:
    """A task for each batch that is not over."""

    def __init__(self, server: Server, router: Router, files: FileStore, folder: Path, keys: Keys | None) -> None:
        self._server, self._router, self._files, self._folder = server, router, files, folder
        self._keys = keys
        self.records: dict[str, BatchRecord] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def load(self) -> None:
        """Read the records of an earlier run, and go on with those that are not over."""
        for path in sorted(self._folder.glob("batch_*.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
            except (OSError, msgspec.DecodeError) as error:
                logger.warning("%s is not used: %s", path, error)
                continue
            self.records[record.id] = record
            if record.is_running:
                self.start(record)

    async def add(self, record: BatchRecord) -> None:
        """Begin a new batch."""
        await self._save(record)
        self.start(record)

    def start(self, record: BatchRecord) -> None:
        self.records[record.id] = record
        task = asyncio.get_running_loop().create_task(self._run(record))
        self._tasks[record.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(record.id, None))

    async def cancel(self, record: BatchRecord) -> None:
        """Stop a batch; what was answered stays in its files."""
        record.status, record.cancelling_at = "cancelling", int(time.time())
        await self._save(record)

    async def _save(self, record: BatchRecord) -> None:
        await asyncio.to_thread(write_atomically, self._folder / f"{record.id}.json", msgspec.json.encode(record))

    async def _run(self, record: BatchRecord) -> None:
        try:
            while not self._server.has_started:  # the models of the last run are loading
                await asyncio.sleep(START_POLL_S)
            await self._answer_all(record)
        except Exception:
            logger.exception("batch %s failed", record.id)
            record.status, record.failed_at = "failed", int(time.time())
            record.errors = [
                {"code": "server_error", "line": None, "message": "the batch failed; see the server's log"}
            ]
            await self._save(record)

    async def _answer_all(self, record: BatchRecord) -> None:
        stored = self._files.get(record.input_file_id, record.owner)
        content = b"" if stored is None else await asyncio.to_thread(self._files.read, stored)
        requests, problems = await asyncio.to_thread(read_requests, content, record.endpoint)
        if problems:
            record.status, record.failed_at, record.errors = "failed", int(time.time()), problems
            await self._save(record)
            return
        outputs = ResultFile(self._folder / f"{record.id}.outputs")
        errors = ResultFile(self._folder / f"{record.id}.errors")
        done, failed = await asyncio.to_thread(outputs.done), await asyncio.to_thread(errors.done)
        record.total, record.completed, record.failed = len(requests), len(done), len(failed)
        record.in_progress_at = record.in_progress_at or int(time.time())
        await self._save(record)
        left = iter([request for request in requests if request.custom_id not in done | failed])
        number = self._num_at_a_time(requests[0])
        async with asyncio.TaskGroup() as workers:
            for _ in range(number):
                workers.create_task(self._work(record, left, outputs, errors))
        if not self._server.is_draining:
            await self._finish(record, outputs, errors)

    def _num_at_a_time(self, request: BatchRequest) -> int:
        """A share of the model's places, so that live requests find one."""
        try:
            model, _ = find_model(self._server.registry, str(request.body.get("model", "")), "generate")
        except ModelNotFound:
            return DEFAULT_AT_A_TIME
        num_places = sum(worker.places for worker in model.pool.workers)
        return max(1, min(MAX_AT_A_TIME, num_places // PLACES_SHARE)) if num_places else DEFAULT_AT_A_TIME

    async def _work(
        self,
        record: BatchRecord,
        left: Iterator[BatchRequest],
        outputs: ResultFile,
        errors: ResultFile,
    ) -> None:
        """Answer one request after another, until none is left or the batch is to stop."""
        for request in left:
            if (result := await self._answer(record, request)) is None:
                return
            is_success = result["response"]["status_code"] == 200
            await asyncio.to_thread((outputs if is_success else errors).append, result)
            record.completed += is_success
            record.failed += not is_success

    async def _answer(self, record: BatchRecord, request: BatchRequest) -> Document | None:
        """The result of a request; None if the batch is to stop. An unavailable server is tried again."""
        num_failures = 0
        while not self._should_stop(record):
            tenant = None if self._keys is None else self._keys.tenant_of(record.owner)
            exchange = BatchExchange(request.url, msgspec.json.encode(request.body), tenant)
            self._router.handle(exchange)
            try:
                status, body, headers = await exchange.done
            except asyncio.CancelledError:
                exchange.drop()
                raise
            num_failures += status == 503
            if status == 429 or (status == 503 and num_failures <= MAX_FAILURES):
                await asyncio.sleep(wait_s(headers, num_failures))
                continue
            response = {"status_code": status, "request_id": exchange.request_id, "body": msgspec.json.decode(body)}
            id = f"batch_req_{exchange.request_id}"
            return {"id": id, "custom_id": request.custom_id, "response": response, "error": None}
        return None

    def _has_key(self, record: BatchRecord) -> bool:
        """Whether the key that made a batch is still valid."""
        return self._keys is None or self._keys.tenant_of(record.owner) is not None

    def _should_stop(self, record: BatchRecord) -> bool:
        if not self._has_key(record):
            return True
        return record.status == "cancelling" or self._server.is_draining or time.time() >= record.expires_at

    async def _finish(self, record: BatchRecord, outputs: ResultFile, errors: ResultFile) -> None:
        is_cancelled, is_complete = record.status == "cancelling", record.completed + record.failed == record.total
        record.status, record.finalizing_at = "finalizing", int(time.time())
        output_file_id = await self._keep(record, outputs, "output")
        error_file_id = await self._keep(record, errors, "error")
        now = int(time.time())
        record.output_file_id, record.error_file_id = output_file_id, error_file_id
        if is_complete:
            record.status, record.completed_at = "completed", now
        elif not self._has_key(record):
            record.status, record.failed_at = "failed", now
            text = f"the key {record.owner!r} that made the batch was revoked or has expired"
            record.errors = [problem("invalid_api_key", None, text)]
        elif is_cancelled:
            record.status, record.cancelled_at = "cancelled", now
        else:
            record.status, record.expired_at = "expired", now
        await self._save(record)
        logger.info("batch %s is %s: %d of %d", record.id, record.status, record.completed, record.total)

    async def _keep(self, record: BatchRecord, results: ResultFile, kind: str) -> str | None:
        if not results.path.exists():
            return None
        stored = await asyncio.to_thread(
            self._files.add,
            results.path,
            filename=f"{record.id}_{kind}.jsonl",
            purpose="batch_output",
            owner=record.owner,
            now=time.time(),
        )
        return stored.id


def wait_s(headers: Iterable[Header], num_failures: int) -> float:
    """Seconds until a request is tried again: as the server says, or longer from time to time."""
    asked = header(headers, "retry-after") or ""
    if asked.isdecimal():
        return min(MAX_BACKOFF_S, float(asked))
    return min(MAX_BACKOFF_S, BACKOFF_S * float(2**num_failures))


def metadata_of(document: Mapping[str, object]) -> dict[str, str]:
    return {str(name): str(value) for name, value in document.items()}
