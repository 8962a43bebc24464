"""ModelConfig: batching, placement and lifetime settings of one model (`model-config.yaml`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from flambeau.config.placement import PlacementSettings, read_placement
from flambeau.config.yaml_file import read_options as read_options
from flambeau.errors import suggest

logger = logging.getLogger(__name__)

T = TypeVar("T")
LARGEST = 1 << 31  # the limit of 32-bit integers
MAX_WORKERS = 10_000  # of a model; more are a mistake or an attack
MODEL_DEFAULTS = "models in config.properties"
MAX_CACHE_MB = 1 << 20
DEFAULT_CACHE_S = 300
MAX_RANKS = 1024  # processes or devices of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Settings of one model; `options` is the whole YAML document, for the handler."""

    min_workers: int = 1
    max_workers: int = 1
    batch_size: int = 1
    batch_delay_s: float | None = None  # None: an idle worker never waits
    response_timeout_s: float = 120
    startup_timeout_s: float = 120
    max_retry_s: float = 300
    client_timeout_s: float | None = None
    queue_size: int = 100
    concurrency: int = 64  # concurrent jobs of a worker with an `async def` handler
    memory_limit_mb: int | None = None
    renew_after: int = 0  # requests, after which a worker is replaced; 0: never
    renew_above_mb: int = 0  # memory, above which a worker is replaced when it has finished its jobs; 0: never
    quarantine_after: int = 0  # workers that a request has ended, after which it is refused; 0: never
    detects_hangs: bool = True  # replace workers that hang before response_timeout_s
    hang_s: float = 10  # how long a worker must look hung
    device_type: Literal["cpu", "gpu"] | None = None
    device_ids: tuple[int, ...] = ()
    use_job_ticket: bool = False  # jobs are accepted only while a worker is idle
    continuous_batching: bool = False  # jobs join and leave a batch between calls of the handler
    sequence_batching: bool = False  # the jobs of a sequence go to one worker, in order
    sequence_max_idle_s: float = 0
    sequence_timeout_s: float | None = None
    sequence_queue_size: int = 1
    max_sequences: int = 1
    async_communication: bool = False
    parallel_type: Literal["", "pp", "tp", "pptp", "custom"] = ""
    parallel_level: int = 0  # devices or processes per worker
    torchrun: Mapping[str, Any] = field(default_factory=dict)
    use_venv: bool = False
    target_queue_s: float = 0.1  # a worker is added, up to max_workers, when jobs wait longer than this
    idle_s: float = 60  # after this long without a job, workers beyond min_workers retire
    scales_to_zero: bool = False  # the last worker retires too, and the next job starts it again
    envelope: str | None = None  # None: the server's; "": none
    response_cache_mb: int = 0  # of replies that are kept and sent again; 0: none
    response_cache_s: float = DEFAULT_CACHE_S  # how long they are kept; 0: not at all
    response_cache_headers: tuple[str, ...] | None = None  # that answers depend on, in lower case; None: all
    cluster: PlacementSettings | None = None  # where its workers run, if the server has a cluster; None: the defaults
    openai: bool = True  # False hides the model from the OpenAI API
    options: Mapping[str, Any] = field(default_factory=dict)
    # Where each field got its value: a file, a flag, a call; without an entry, it is the default.
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def updated(self, changes: Mapping[str, Any], where: str) -> ModelConfig:
        """These settings with some fields changed, by what `where` names; `origins` among them names other places."""
        named = dict.fromkeys(changes.keys() - {"options", "origins"}, where) | changes.get("origins", {})
        return replace(self, **{**changes, "origins": {**self.origins, **named}})

    def with_options(self, options: Mapping[str, Any], where: str = "model-config.yaml") -> ModelConfig:
        """These settings, overridden by a model-config.yaml; `where` names the file in warnings."""
        read = _Reader(options, where)
        _warn_of_misspelled_keys(options, where)
        changes: dict[str, Any] = {"options": options}
        origin = where.partition(" of ")[0]
        if pair := _workers(read):
            changes |= {"min_workers": pair[0], "max_workers": pair[1]}
        if size := read.whole("batchSize", 0, at_least=1):
            changes["batch_size"] = size
        if (delay := read.number("maxBatchDelay", -1)) >= 0:
            changes["batch_delay_s"] = delay / 1000
        for key, name in _MILLISECONDS.items():
            if milliseconds := read.number(key, 0):
                changes[name] = milliseconds / 1000
        for key, name in _SWITCHES.items():
            if key in options:
                changes[name] = read.get(key, bool, False)
        parallelism = _parallelism(read)
        changes |= {name: value for name, value in parallelism.items() if value != getattr(self, name)}
        _check_handler(read)
        device = read.get("deviceType", str, "")
        if device in ("cpu", "gpu"):
            changes["device_type"] = device
        elif device:
            read.warn("deviceType is %r; it may be cpu or gpu, so it is ignored", device)
        if envelope := read.get("envelope", str, ""):
            changes["envelope"] = "" if envelope == "none" else envelope
        for key, name in _PLAIN.items():
            if value := read.number(key, 0) if name.endswith("_s") else read.whole(key, 0):
                changes[name] = value
            elif options.get(key) == 0:
                read.warn("%s is 0 and has no effect: %s is used; set a number from 1", key, getattr(self, name))
        ids = read.get("deviceIds", list, [])
        if ids and all(type(i) is int and i >= 0 for i in ids):
            changes["device_ids"] = tuple(ids)
        elif ids:
            read.warn("deviceIds must be a list of device numbers; this one is ignored")
        changes |= _response_cache(read)
        if "cluster" in options:
            changes["cluster"] = read_placement(options["cluster"], read.warn)
        return self.updated(changes, origin)

    def with_settings(self, settings: Mapping[str, Any], *, workers: bool) -> ModelConfig:
        """These settings, overridden by `models` in config.properties, where values below 1 mean unset."""
        read = _Reader(settings, MODEL_DEFAULTS)
        numbers = {key: read.number(key, 0, at_least=None) for key in _SETTINGS if key in settings}
        given = {key: value for key, value in numbers.items() if value > 0}
        plain = {k: v for k, v in given.items() if "Workers" not in k}
        config = replace(self.with_options(plain, MODEL_DEFAULTS), options=self.options)
        if not workers or not {"minWorkers", "maxWorkers"} & given.keys():
            return config
        if max(given.get("minWorkers", 0), given.get("maxWorkers", 0)) > MAX_WORKERS:
            read.warn("a model may have %d workers; this number is ignored", MAX_WORKERS)
            return config
        low, high = int(given.get("minWorkers", 0)), int(given.get("maxWorkers", self.max_workers))
        low = low or min(self.min_workers, high)
        return config.updated({"min_workers": low, "max_workers": max(low, high)}, MODEL_DEFAULTS)

    @property
    def schedule(self) -> Literal["batches", "continuous", "sequences", "async"]:
        """How workers receive jobs; continuous batching overrides sequences, and both override async."""
        if self.continuous_batching:
            return "continuous"
        if self.sequence_batching:
            return "sequences"
        return "async" if self.async_communication else "batches"

    @property
    def num_together(self) -> int:
        """The maximum number of jobs in one call of the handler."""
        if self.schedule == "async":
            return 1
        return self.batch_size * (2 if self.continuous_batching and self.sequence_batching else 1)

    @property
    def batch_delay_ms(self) -> int:
        """How long an idle worker waits for a batch to fill, as `describe` reports it."""
        return 0 if self.batch_delay_s is None else round(self.batch_delay_s * 1000)


_SETTINGS = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout")
_PLAIN = {
    "responseTimeout": "response_timeout_s",
    "startupTimeout": "startup_timeout_s",
    "maxRetryTimeoutInSec": "max_retry_s",
    "jobQueueSize": "queue_size",
    "maxConcurrency": "concurrency",
    "workerMemoryLimitMb": "memory_limit_mb",
    "quarantineAfterCrashes": "quarantine_after",
    "renewAfterRequests": "renew_after",
    "renewAboveMb": "renew_above_mb",
    "maxSequenceJobQueueSize": "sequence_queue_size",
    "maxNumSequence": "max_sequences",
    "idleTimeoutInSec": "idle_s",
    "hangTimeoutInSec": "hang_s",
}
_MILLISECONDS = {
    "clientTimeoutInMills": "client_timeout_s",
    "sequenceMaxIdleMSec": "sequence_max_idle_s",
    "sequenceTimeoutMSec": "sequence_timeout_s",
    "targetQueueTimeInMills": "target_queue_s",
}
_SWITCHES = {
    "useJobTicket": "use_job_ticket",
    "continuousBatching": "continuous_batching",
    "sequenceBatching": "sequence_batching",
    "asyncCommunication": "async_communication",
    "useVenv": "use_venv",
    "scaleToZero": "scales_to_zero",
    "openai": "openai",
    "hangDetection": "detects_hangs",
}
_PARALLEL_TYPES = ("pp", "tp", "pptp", "custom")
_OTHERS = (
    *("deviceType", "deviceIds", "parallelType", "parallelLevel", "torchrun", "envelope", "cluster"),
    *("responseCacheMb", "responseCacheInSec", "responseCacheHeaders"),
)
MODEL_KEYS = (*dict.fromkeys((*_SETTINGS, *_PLAIN, *_MILLISECONDS, *_SWITCHES, *_OTHERS)),)
# Names of built-in handlers: a section of such a name looks like their settings, which are read below `handler:`.
HANDLER_NAMES = (
    "base_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
    "dali_image_classifier",
    "text_classifier",
    "onnx",
    "gpt_handler",
    "sentence_embedder",
    "transformers",
)
MIN_SIMILARITY = 0.9  # minimum similarity for a key to count as a misspelling


def _warn_of_misspelled_keys(options: Mapping[str, Any], where: str) -> None:
    """Warn of keys that nearly match a known one, or name a handler; all other keys belong to the handler."""
    plain = {_plain(key): key for key in MODEL_KEYS}
    for key, value in options.items():
        if key in HANDLER_NAMES and isinstance(value, Mapping):
            text = "%s: %s is left to the handler; the settings of a built-in handler belong below handler:"
            logger.warning(text, where, key)
        elif isinstance(key, str) and key not in MODEL_KEYS:
            near = suggest(_plain(key), plain, cutoff=MIN_SIMILARITY)
            if near is not None and plain[near] not in options:
                text = "%s: %s is left to the handler; did you mean %s, which the server reads?"
                logger.warning(text, where, key, plain[near])


def _plain(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "")


def _workers(read: _Reader) -> tuple[int, int] | None:
    """(minimum, maximum) workers; an invalid pair is ignored with a warning."""
    low = read.whole("minWorkers", 0, at_least=None, at_most=MAX_WORKERS)
    high = read.whole("maxWorkers", 0, at_most=MAX_WORKERS)
    if "minWorkers" in read.options and low < 1:
        read.warn("minWorkers is %r and counts as 1; scaleToZero: true lets the last worker go", low)
        low = 1
    if low > 0 and high >= low:
        return low, high
    if "minWorkers" in read.options and "maxWorkers" in read.options:
        read.warn("maxWorkers is less than minWorkers, so both are ignored")
    elif "minWorkers" in read.options or "maxWorkers" in read.options:
        there, missing = ("minWorkers", "maxWorkers") if "minWorkers" in read.options else ("maxWorkers", "minWorkers")
        read.warn("%s is ignored without %s; give both", there, missing)
    return None


def _parallelism(read: _Reader) -> dict[str, Any]:
    """The number of processes or devices per worker; `parallelLevel` counts only with a `parallelType`."""
    kind = read.get("parallelType", str, "")
    if kind not in ("", *_PARALLEL_TYPES):
        read.warn("parallelType is %r; it may be %s, so it is ignored", kind, ", ".join(_PARALLEL_TYPES))
        kind = ""
    torchrun = read.get("torchrun", dict, {})
    ranks, key = (_Reader(torchrun, read.where), "nproc-per-node") if torchrun else (read, "parallelLevel")
    level = ranks.whole(key, 1 if torchrun else 0, at_most=MAX_RANKS)
    ids = read.options.get("deviceIds")
    if kind == "tp" and not level and isinstance(ids, list):
        level = len(ids)  # one rank per named device
        logger.info(
            "%s: parallelType is tp: each worker has %d processes, one for each of deviceIds", read.where, level
        )
    if kind in ("tp", "pp", "pptp") and not level:
        read.warn("parallelType %s has no effect: add parallelLevel, or torchrun with nproc-per-node", kind)
    elif level and not kind and "parallelType" not in read.options:
        read.warn(
            "%s has no effect without parallelType; it may be %s",
            "torchrun" if torchrun else "parallelLevel",
            ", ".join(_PARALLEL_TYPES),
        )
    return {"parallel_type": kind, "parallel_level": level if kind else 0, "torchrun": torchrun}


def _response_cache(read: _Reader) -> dict[str, Any]:
    """Whether replies are kept, how long, and on which headers they depend."""
    changes: dict[str, Any] = {}
    if "responseCacheMb" in read.options:
        changes["response_cache_mb"] = read.whole("responseCacheMb", 0, at_most=MAX_CACHE_MB)
    if "responseCacheInSec" in read.options:
        changes["response_cache_s"] = read.number("responseCacheInSec", DEFAULT_CACHE_S)
    names = read.options.get("responseCacheHeaders")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        changes["response_cache_headers"] = tuple(name.strip().lower() for name in names)
    elif names is not None:
        read.warn("responseCacheHeaders must be a list of names; it is ignored, so all headers count")
    return changes


def _check_handler(read: _Reader) -> None:
    """The section is the handler's; here it is checked only for a form that no handler can read."""
    section = read.options.get("handler")
    if section is not None and not isinstance(section, (str, Mapping)):
        read.warn("handler is %s, and no handler reads it; write keys and values below it, indented", _brief(section))


class _Reader:
    """Reads typed values from a YAML mapping; a wrong type is a warning, and the default is used."""

    def __init__(self, options: Mapping[str, Any], where: str) -> None:
        self.options = options
        self.where = where

    def warn(self, text: str, *values: object) -> None:
        logger.warning("%s: " + text, self.where, *values)

    def get(self, key: str, kind: type[T], default: T) -> T:
        value = self.options.get(key, default)
        if isinstance(value, kind):
            return value
        self.warn("%s must be %s, not %s; the default is used", key, kind.__name__, _brief(value))
        return default

    def whole(self, key: str, default: int, *, at_least: int | None = 0, at_most: int = LARGEST) -> int:
        value = self.number(key, default, at_least=at_least)
        if value == int(value) and (key not in self.options or value <= at_most):
            return int(value)
        bound = f" of at most {at_most}" if value > at_most else ""
        self.warn("%s must be a whole number%s, not %s; the default is used", key, bound, _brief(value))
        return default

    def number(self, key: str, default: int, *, at_least: int | None = 0) -> int | float:
        value = self.options.get(key, default)
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
        if not is_number or (at_least is not None and key in self.options and value < at_least):
            bound = "" if at_least is None else f" of at least {at_least}"
            self.warn("%s must be a number%s, not %s; the default is used", key, bound, _brief(value))
            return default
        return value  # type: ignore[no-any-return]


def _brief(value: object) -> str:
    """A short description of any value."""
    is_plain = value is None or isinstance(value, (str, int, float))
    return repr(value)[:80] if is_plain else f"a {type(value).__name__}"
