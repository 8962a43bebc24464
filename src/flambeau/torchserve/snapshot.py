"""Snapshots: the registered models and their settings, saved as TorchServe saves them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from flambeau.errors import ConfigError
from flambeau.serving.change_writer import ChangeWriter
from flambeau.serving.model import Model
from flambeau.serving.registry import Registry
from flambeau.serving.server import Server
from flambeau.serving.traffic_split import WHOLE
from flambeau.small_files import read_small, write_synced
from flambeau.torchserve.java_properties import MAX_PROPERTIES_BYTES, dump, parse

Kind = Literal["startup", "snapshot", "shutdown"]
DEFAULT_BATCH_DELAY_MS = 100  # TorchServe's; a model without a delay is saved with it
_NAME = re.compile(r"(\d{17})-(startup|snapshot|shutdown)\.cfg")
KEPT = 50  # snapshots in a folder
DRAFT_S = 60  # after this time a draft belongs to a server that was killed
_DRAFT = re.compile(rf"\.{_NAME.pattern}\.draft")
_END = "#end"
_COMMENT = f"Saving snapshot\n#The last line is {_END}"  # so that a cut file is noticed, wherever it is cut
_REQUIRED = ("defaultVersion", "marName", "minWorkers", "maxWorkers", "batchSize", "maxBatchDelay")


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotModel:
    """One model of a snapshot: its archive and its settings."""

    name: str
    version: str
    archive: str  # a file or folder of the store, or a path
    is_default: bool
    traffic_percent: int  # of the requests that name no version; 0: the default's, or none
    settings: Mapping[str, Any]  # fields of ModelConfig that override the model's YAML


def name_for(kind: Kind, now: datetime, last: str | None = None) -> str:
    """The name of a snapshot; it sorts after the last one, even within a millisecond."""
    before = moment_of(last) if last else None
    moment = max(now, before + timedelta(milliseconds=1)) if before else now
    return f"{moment:%Y%m%d%H%M%S}{moment.microsecond // 1000:03d}-{kind}.cfg"


def moment_of(name: str) -> datetime | None:
    """The time in the name of a snapshot; None for other files."""
    match = _NAME.fullmatch(name)
    try:
        return datetime.strptime(f"{match[1]}000", "%Y%m%d%H%M%S%f") if match else None
    except ValueError:
        return None


def snapshots_in(folder: Path) -> list[Path]:
    """The snapshots in a folder, latest first; other files are ignored."""
    try:
        names = [path.name for path in folder.iterdir() if moment_of(path.name)]
    except OSError:
        return []
    return [folder / name for name in sorted(names, reverse=True)]


def newest_whole(folder: Path, on_skipped: Callable[[Path, str], None] = lambda path, problem: None) -> Path | None:
    """The latest snapshot that is not torn; `on_skipped` gets each later one and its problem."""
    for path in snapshots_in(folder):
        if not (problem := damage_of(path)):
            return path
        on_skipped(path, problem)
    return None


def damage_of(path: Path) -> str:
    """Why a snapshot is torn or cannot be read; empty if it is whole. Wrong values are not damage."""
    try:
        text = read_small(path, MAX_PROPERTIES_BYTES).decode("iso-8859-1")
    except OSError as error:
        return error.strerror or str(error)
    if _COMMENT in text and not text.rstrip("\n").endswith(f"\n{_END}"):
        return "its end is missing"
    try:
        saved = parse(text).get("model_snapshot")
        if saved is None:
            return "it has no model_snapshot"
        json.loads(saved)
    except ConfigError:
        return ""  # a variable that is not set
    except (ValueError, RecursionError) as error:
        return f"its model_snapshot is not JSON: {error}"
    return ""


def to_documents(registry: Registry) -> dict[str, dict[str, dict[str, Any]]]:
    """All registered models by name and version, under TorchServe's keys, without the nodes of workflows."""
    documents: dict[str, dict[str, dict[str, Any]]] = {}
    for model in registry:
        if model.workflow:
            continue
        document = to_document(model, is_default=registry.is_default(model))
        documents.setdefault(model.name, {})[model.version] = document
    return documents


def to_document(model: Model, *, is_default: bool) -> dict[str, Any]:
    config = model.config
    document: dict[str, Any] = {
        "defaultVersion": is_default,
        "marName": model.source.downloaded.name if model.source.downloaded else model.source.url,
        "minWorkers": model.pool.min_workers,
        "maxWorkers": model.pool.max_workers,
        "batchSize": config.batch_size,
        "maxBatchDelay": DEFAULT_BATCH_DELAY_MS if config.batch_delay_s is None else config.batch_delay_ms,
        "responseTimeout": max(1, round(config.response_timeout_s)),
        "startupTimeout": max(1, round(config.startup_timeout_s)),
        "runtimeType": model.source.manifest.runtime if model.source.manifest else "python",
    }
    if model.split is not None and not is_default and (percent := model.split.percent_of(model)):
        document["trafficPercent"] = percent  # of this server only
    if config.parallel_level > 0:
        document["parallelLevel"] = config.parallel_level
    return document


def to_text(
    name: str,
    created: datetime,
    given: Mapping[str, str],
    models: Mapping[str, Mapping[str, dict[str, Any]]],
    store: Path | None,
) -> str:
    """The text of a snapshot file: every setting that was given, and the models."""
    document = {
        "name": name,
        "modelCount": sum(map(len, models.values())),
        "created": round(created.timestamp() * 1000),
        "models": {
            model: {
                version: {**saved, "marName": archive_name(saved["marName"], store)}
                for version, saved in versions.items()
            }
            for model, versions in models.items()
        },
    }
    return dump({**given, "model_snapshot": json.dumps(document, indent=2)}, _COMMENT) + f"{_END}\n"


def archive_name(url: str, store: Path | None) -> str:
    """The name of an archive in the store; an archive elsewhere keeps its path, so that it is found again."""
    file = Path(url).name
    return file if store is not None and (store / file).exists() else url


def read_snapshot(text: str) -> list[SnapshotModel]:
    """Parse a `model_snapshot` written by this server, by TorchServe or by hand."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model_snapshot is not JSON: {error}") from None
    models = document.get("models") if isinstance(document, dict) else None
    if not isinstance(models, dict):
        raise ConfigError('model_snapshot must be a JSON object with "models"')
    return [saved for name, versions in models.items() for saved in _versions(name, versions)]


def _versions(name: str, versions: Any) -> Iterable[SnapshotModel]:
    if not isinstance(versions, dict):
        raise ConfigError(f"model_snapshot: model {name} must map versions to their settings")
    for version, saved in versions.items():
        where = f"model_snapshot: model {name}, version {version}"
        if not isinstance(saved, dict):
            raise ConfigError(f"{where} must be an object")
        if missing := [key for key in _REQUIRED if key not in saved]:
            raise ConfigError(f"{where} has no {', '.join(missing)}")
        if not isinstance(saved["marName"], str) or not saved["marName"]:
            raise ConfigError(f"{where}: marName must name an archive, not {saved['marName']!r}")
        yield SnapshotModel(
            name=name,
            version=version,
            archive=saved["marName"],
            is_default=saved["defaultVersion"] is True,
            traffic_percent=_number({"trafficPercent": 0, **saved}, "trafficPercent", 0, where, at_most=WHOLE),
            settings=_settings(saved, where),
        )


def _number(saved: Mapping[str, Any], key: str, at_least: int, where: str, *, at_most: int | None = None) -> int:
    value = saved[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ConfigError(f"{where}: {key} must be a whole number of at least {at_least}, not {value!r}")
    if at_most is not None and value > at_most:
        raise ConfigError(f"{where}: {key} must be at most {at_most}, not {value}")
    return value


def _settings(saved: Mapping[str, Any], where: str) -> dict[str, Any]:
    def number(key: str, at_least: int) -> int:
        return _number(saved, key, at_least, where)

    low = number("minWorkers", 0)
    settings: dict[str, Any] = {
        "min_workers": low,
        "max_workers": max(low, number("maxWorkers", 0)),
        "batch_size": number("batchSize", 1),
    }
    # The default is also written where nothing was set; then the model's YAML decides.
    if (delay := number("maxBatchDelay", 0)) != DEFAULT_BATCH_DELAY_MS:
        settings["batch_delay_s"] = delay / 1000
    for key, field in (("responseTimeout", "response_timeout_s"), ("startupTimeout", "startup_timeout_s")):
        if key in saved:
            settings[field] = number(key, 1)
    return settings


class SnapshotWriter:
    """Writes one file at the start, after each change and at the end, in order and off the event loop."""

    def __init__(self, folder: Path, given: Mapping[str, str], server: Server) -> None:
        self._folder = folder
        self._given = given
        self._server = server
        self._last: str | None = None
        self._writer = ChangeWriter(self._write, folder)
        self.written = self._writer.written
        self.close = self._writer.close

    def save(self, kind: Kind) -> None:
        """Queue a snapshot of the models as they are now."""
        self._writer.save((kind, to_documents(self._server.registry)))

    def _write(self, change: tuple[Kind, dict[str, Any]]) -> None:
        kind, models = change
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._last is None and (there := snapshots_in(self._folder)):
            self._last = there[0].name
        now = datetime.now()
        name = name_for(kind, now, self._last)
        text = to_text(name, now, self._given, models, self._server.config.model_store)
        # Readable by this user only: the settings may include keystore_pass, which the next start needs.
        write_synced(self._folder / f".{name}.draft", self._folder / name, text.encode("iso-8859-1"))
        self._last = name
        with suppress(OSError):  # the snapshot is written; the next one tries again
            prune(self._folder)


def prune(folder: Path) -> None:
    """Delete all but the latest snapshots, and the drafts of servers that were killed."""
    old = [path for path in folder.iterdir() if _DRAFT.fullmatch(path.name) and is_older(path, DRAFT_S)]
    for path in [*snapshots_in(folder)[KEPT:], *old]:
        path.unlink(missing_ok=True)


def is_older(path: Path, age_s: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime > age_s
    except OSError:
        return False
