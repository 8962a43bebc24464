"""From a server's settings to its logs: files and stdout with a log folder, stderr without."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from flambeau.config.server import ServerConfig
from flambeau.errors import ConfigError
from flambeau.logs.layouts import ACCESS, MODEL, MODEL_METRICS, SERVER, TS_METRICS
from flambeau.logs.rolling import MAX_BYTES, RollingFile
from flambeau.logs.writer import Logs, QueueHandler
from flambeau.torchserve.log4j import LogChoices, read_log4j

logger = logging.getLogger(__name__)

STDOUT, STDERR = 1, 2
FILES = {
    ACCESS: "access_log.log",
    SERVER: "ts_log.log",
    MODEL: "model_log.log",
    TS_METRICS: "ts_metrics.log",
    MODEL_METRICS: "model_metrics.log",
}


def open_logs(config: ServerConfig, level: str = "info") -> Logs:
    """Open a server's logs and lead Python's logging into them."""
    if config.log_folder is None and config.log_config is None:
        logs = Logs(STDERR, has_access_log=bool(config.access_log))
        lead_into(logs, logging.getLevelName(level.upper()))
        return logs
    choices = read_choices(config)
    folder = config.log_folder or Path("logs")
    wanted = choices_files(choices) if choices else default_files(folder, config.metrics_log_folder or folder)
    files, problem = open_files(wanted, choices.max_bytes if choices else None)
    logs = Logs(
        STDOUT if choices is None or choices.has_console else None,
        files,
        levels=choices.levels if choices else {},
        is_terminal=False,
        has_access_log=config.access_log is not False,
    )
    lead_into(logs, min(choices.levels.get(SERVER, logging.INFO), logging.INFO) if choices else logging.DEBUG)
    if problem:
        logger.warning("%s; what would be written there goes to the console only", problem)
    if choices and choices.ignored:
        logger.warning("%s: without effect here: %s", config.log_config, ", ".join(choices.ignored))
    return logs


def lead_into(logs: Logs, level: int) -> None:
    """Make Logs the only place that Python's logging writes to; other libraries keep quiet below INFO."""
    logging.basicConfig(level=max(level, logging.INFO), handlers=[QueueHandler(logs)], force=True)
    logging.getLogger("flambeau").setLevel(level)


def default_files(folder: Path, metrics_folder: Path) -> dict[str, Path]:
    """TorchServe's five files."""
    metrics = (TS_METRICS, MODEL_METRICS)
    return {channel: (metrics_folder if channel in metrics else folder) / name for channel, name in FILES.items()}


def choices_files(choices: LogChoices) -> dict[str, Path]:
    """The files that a log4j2 file names."""
    return {channel: Path(name) for channel, name in choices.files.items()}


def open_files(wanted: Mapping[str, Path], max_bytes: int | None) -> tuple[dict[str, RollingFile], str]:
    """Open what can be opened; the text says why something cannot."""
    files: dict[str, RollingFile] = {}
    problem = ""
    for channel, path in wanted.items():
        try:
            files[channel] = RollingFile(path, max_bytes or MAX_BYTES)
        except OSError as error:
            problem = problem or f"the log folder {path.parent} cannot be written: {error.strerror}"
    return files, problem


def read_choices(config: ServerConfig) -> LogChoices | None:
    """What the log configuration asks for, if there is one."""
    if config.log_config is None:
        return None
    try:
        text = config.log_config.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--log-config {config.log_config} cannot be read: {error}") from None
    folder = str(config.log_folder or "logs")
    metrics = str(config.metrics_log_folder or folder)
    return read_log4j(text, {**os.environ, "LOG_LOCATION": folder, "METRICS_LOCATION": metrics})
