"""Crash bundles: a private folder on disk for each worker that died or hung, with what is needed to find the cause."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flambeau import __version__
from flambeau.errors import ConfigError
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import WorkerRef
from flambeau.serving.job import Job
from flambeau.serving.model_sources.store import make_private
from flambeau.wire.messages import header

logger = logging.getLogger(__name__)

DOCUMENT = "bundle.json"
STACKS = "stacks.txt"
OUTPUT = "output.txt"
FORMAT = 1
MAX_READ_BYTES = 64 << 20  # of the requests of one bundle
MAX_REQUESTS = 64  # of one bundle
PACKAGES = ("torch", "numpy", "transformers", "onnxruntime")
SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})
SECRET_KEY = re.compile(r"token|secret|passw|credential|api.?key", re.IGNORECASE)
MASK = "********"
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that a worker held when it died. The body is None if there were too many bytes to keep."""

    id: str
    kind: str
    url_path: str
    query: str
    envelope: str
    headers: tuple[tuple[str, str], ...]
    fields: list[tuple[str, int]] | None
    size_bytes: int
    body: bytes | None
    batch_size: int  # requests that ran together with it, and itself
    crashes: int  # workers that died with it, with this one

    @property
    def content_type(self) -> str:
        return header(self.headers, "content-type") or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    """What is known of a worker that died or hung."""

    at: float  # seconds since the epoch
    worker: WorkerRef
    pids: Sequence[int]
    age_s: float
    device: int | None
    node: str = ""  # the machine of a cluster; empty: this one
    exit: WorkerExit
    model: Mapping[str, Any]  # where it is and how it is configured
    requests: Sequence[RequestRecord] = field(default_factory=list)


def read_requests(suspects: Iterable[tuple[Job, int]]) -> list[RequestRecord]:
    """The requests of a worker that died, before they are answered; `suspects` come with the size of their batch."""
    left_bytes = MAX_READ_BYTES
    records = []
    for job, batch_size in itertools.islice(suspects, MAX_REQUESTS):
        body, content = job.body, None
        if body.size_bytes <= left_bytes:
            left_bytes -= body.size_bytes
            content = body.content if body.segment is None else body.segment.memory[: body.size_bytes]
        records.append(
            RequestRecord(
                id=job.request_id,
                kind=job.kind,
                url_path=job.url_path,
                query=job.query,
                envelope=job.envelope,
                headers=tuple(job.headers),
                fields=job.fields,
                size_bytes=body.size_bytes,
                body=content,
                batch_size=batch_size,
                crashes=job.crashes + 1,
            )
        )
    return records


def default_folder(log_folder: Path | None = None) -> Path:
    """Where bundles are kept unless a setting names another folder."""
    if log_folder is not None:
        return log_folder / "crashes"
    return Path(tempfile.gettempdir()) / f"flambeau-crashes-{os.geteuid()}"


class CrashBundles:
    """Writes bundles in a thread of its own and keeps the newest ones."""

    def __init__(self, folder: Path, *, num_kept: int, with_payloads: bool) -> None:
        self.folder = folder
        self._num_kept = num_kept
        self._with_payloads = with_payloads
        self._thread: ThreadPoolExecutor | None = None

    def add(self, report: CrashReport) -> str:
        """Write a bundle soon; return the path that it will have, or an empty text if none is kept."""
        if self._num_kept <= 0:
            return ""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="crash-bundles")
        path = self.folder / name_of(report)
        self._thread.submit(self._write, path, report)
        return str(path)

    def close(self) -> None:
        """Return when all are written."""
        if self._thread is not None:
            self._thread.shutdown()

    def _write(self, path: Path, report: CrashReport) -> None:
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            make_private(self.folder)
            write(path, report, with_payloads=self._with_payloads)
            prune(self.folder, self._num_kept)
        except OSError as error:
            logger.warning("the crash bundle %s could not be written: %s", path, error)
        else:
            logger.info("%s: wrote the crash bundle %s; see `flambeau replay`", report.worker, path)


def name_of(report: CrashReport) -> str:
    """A name that sorts by time, and that no other bundle has."""
    model = re.sub(r"[^\w.-]", "_", report.worker.model)[:60]
    moment = datetime.fromtimestamp(report.at, UTC)
    return f"{moment:%Y%m%dT%H%M%S}-{os.getpid()}-{next(_numbers):03d}-{model}"


def write(path: Path, report: CrashReport, *, with_payloads: bool) -> None:
    """Write one bundle. It appears under its name when it is complete."""
    part = path.with_name(f".{path.name}.part")
    part.mkdir(mode=0o700)
    try:
        document = document_of(report, with_payloads=with_payloads)
        _write_private(part / DOCUMENT, json.dumps(document, indent=2, default=str).encode())
        if report.exit.stacks:
            _write_private(part / STACKS, report.exit.stacks.encode("utf-8", "replace"))
        if report.exit.last_lines:
            _write_private(part / OUTPUT, ("\n".join(report.exit.last_lines) + "\n").encode("utf-8", "replace"))
        for entry, request in zip(document["requests"], report.requests, strict=True):
            if entry["payload"] is not None and request.body is not None:
                _write_private(part / entry["payload"], request.body)
        part.rename(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _write_private(file: Path, content: bytes) -> None:
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)


def document_of(report: CrashReport, *, with_payloads: bool) -> dict[str, Any]:
    """The contents of bundle.json."""
    death = report.exit
    return {
        "format": FORMAT,
        "time": datetime.fromtimestamp(report.at, UTC).isoformat(timespec="milliseconds"),
        "kind": kind_of(death),
        "reason": death.reason,
        "exitCode": death.exit_code,
        "signal": death.signal,
        "worker": {
            "id": report.worker.id,
            "pids": [*report.pids],
            "ageInSec": round(report.age_s, 1),
            "gpu": report.device,
            **({"node": report.node} if report.node else {}),
        },
        "model": without_secrets(dict(report.model)),
        "versions": versions(),
        "requests": [
            request_document(number, request, with_payloads=with_payloads)
            for number, request in enumerate(report.requests, 1)
        ],
    }


def kind_of(death: WorkerExit) -> str:
    if death.is_hung:
        return "hang"
    if death.out_of_memory:
        return "out of memory"
    return "load failure" if death.while_loading else "crash"


def request_document(number: int, request: RequestRecord, *, with_payloads: bool) -> dict[str, Any]:
    """The fingerprint of a request, and with payloads what is needed to send it again."""
    is_kept = with_payloads and request.body is not None
    document: dict[str, Any] = {
        "id": request.id,
        "kind": request.kind,
        "sha256": None if request.body is None else hashlib.sha256(request.body).hexdigest(),
        "sizeInBytes": request.size_bytes,
        "contentType": request.content_type,
        "batchSize": request.batch_size,
        "crashes": request.crashes,
        "payload": f"request-{number}.body" if is_kept else None,
    }
    if is_kept:
        document |= {
            "headers": [[name, value] for name, value in request.headers if name.lower() not in SECRET_HEADERS],
            "urlPath": request.url_path,
            "query": request.query,
            "envelope": request.envelope,
            "fields": request.fields,
        }
    return document


def versions() -> dict[str, str]:
    """Versions of this server, its interpreter and packages; a model may have an environment of its own."""
    from importlib.metadata import PackageNotFoundError, version  # here: it takes 7 ms, and few servers need it

    found = {"flambeau": __version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def without_secrets(value: Any) -> Any:
    """The value, with those of keys that look like credentials masked."""
    if isinstance(value, Mapping):
        return {
            str(key): MASK if SECRET_KEY.search(str(key)) and isinstance(inner, str) else without_secrets(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return value


def prune(folder: Path, num_kept: int) -> None:
    """Delete the oldest bundles beyond a number, and unfinished ones of other servers that are an hour old."""
    for path in list_bundles(folder)[num_kept:]:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*.part"):
        if time.time() - path.lstat().st_mtime > 3600:
            shutil.rmtree(path, ignore_errors=True)


def list_bundles(folder: Path) -> list[Path]:
    """The bundles of a folder, the newest first."""
    return sorted((file.parent for file in folder.glob(f"[!.]*/{DOCUMENT}")), reverse=True)


def read_bundle(path: Path) -> dict[str, Any]:
    """The document of a bundle; raises ConfigError if it is not one."""
    try:
        document = json.loads((path / DOCUMENT).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no crash bundle: {error}; list them with `flambeau replay --list`") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a crash bundle that this version reads; its format must be {FORMAT}")
    return document
