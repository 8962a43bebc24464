"""Opens a server's logs: files and stdout with a log folder, stderr without. Python's logging goes there too."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flambeau.config.server import ServerConfig
from flambeau.logs.json_lines import record_format
from flambeau.logs.line_formats import (
    ACCESS,
    MODEL,
    MODEL_METRICS,
    SERVER,
    TS_METRICS,
    message_format,
    printable,
    tidy,
)
from flambeau.logs.log_process import LogProcess, LogTargets
from flambeau.logs.rolling_file import MAX_BYTES
from flambeau.logs.writer import Logs
from flambeau.wire.log_records import fields_of_record

logger = logging.getLogger(__name__)

STDOUT, STDERR = 1, 2
FILES = {
    ACCESS: "access_log.log",
    SERVER: "ts_log.log",
    MODEL: "model_log.log",
    TS_METRICS: "ts_metrics.log",
    MODEL_METRICS: "model_metrics.log",
}


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Files and levels by log, and whether lines also go to stdout; they replace the defaults of a log folder."""

    files: Mapping[str, Path]
    levels: Mapping[str, int]
    has_console: bool = True
    max_bytes: int | None = None  # the size at which a file is rolled


def open_logs(
    config: ServerConfig,
    level: str = "info",
    settings: LogSettings | None = None,
    *,
    has_process: bool = False,
) -> Logs:
    """Open a server's logs and make them the only target of Python's logging.

    `level` counts only for a server that logs to stderr; one with files writes everything. With `has_process`, a
    process of its own writes the files.
    """
    is_json = config.log_format == "json"
    logs: Logs
    if config.log_folder is None and settings is None:
        logs = Logs(STDERR, is_json=is_json, has_access_log=bool(config.access_log))
        redirect_logging(logs, logging.getLevelName(level.upper()))
        return logs
    folder = config.log_folder or Path("logs")
    targets = LogTargets(
        console=STDOUT if settings is None or settings.has_console else None,
        files=settings.files if settings else default_files(folder, config.metrics_log_folder or folder),
        max_bytes=(settings.max_bytes if settings else None) or MAX_BYTES,
        levels=settings.levels if settings else {},
        is_json=is_json,
    )
    has_access_log = config.access_log is not False
    files = targets.open_files()
    failed = next((file for file in files.values() if file.problem), None)
    if has_process:
        for file in files.values():
            file.close()
        logs = LogProcess(targets, has_access_log=has_access_log)
    else:
        logs = targets.open(files, has_access_log=has_access_log)
    redirect_logging(logs, min(settings.levels.get(SERVER, logging.INFO), logging.INFO) if settings else logging.DEBUG)
    if failed is not None:  # it is tried again
        text = "the log folder %s cannot be written: %s; until it can, what belongs there goes to the console only"
        logger.warning(text, failed.path.parent, failed.problem)
    return logs


class QueueHandler(logging.Handler):
    """Passes records of Python's logging to Logs; a record's `worker` is shown as its thread.

    JSON lines show the `extra` values `worker`, `model`, `request_id` and `trace_id` as fields.
    """

    def __init__(self, logs: Logs) -> None:
        super().__init__()
        self._logs = logs
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        is_json = self._logs.is_json
        try:
            message = record.getMessage() if is_json else self.format(record)
        except Exception:
            self.handleError(record)
            return
        worker = getattr(record, "worker", None) or ""
        thread = worker or record.threadName or "main"
        thread = "main" if thread == "MainThread" else thread
        channel = record.name if record.name in (ACCESS, MODEL, TS_METRICS, MODEL_METRICS) else SERVER
        if is_json:
            line = record_format(channel, record.levelno, thread, record.name, worker, getattr(record, "model", ""))
            self._logs.add_now(line, (message, fields_of_record(record)), len(message))
            return
        line = message_format(channel, record.levelno, printable(thread), record.name)
        self._logs.add_now(line, tidy(message), len(message))


def redirect_logging(logs: Logs, level: int) -> None:
    """Send all records of Python's logging to `logs`; those of other libraries from INFO up."""
    logging.basicConfig(level=max(level, logging.INFO), handlers=[QueueHandler(logs)], force=True)
    logging.getLogger("flambeau").setLevel(level)


def default_files(folder: Path, metrics_folder: Path) -> dict[str, Path]:
    metrics = (TS_METRICS, MODEL_METRICS)
    return {channel: (metrics_folder if channel in metrics else folder) / name for channel, name in FILES.items()}
