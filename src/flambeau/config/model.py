"""ModelConfig: how one model is batched, placed and kept alive (`model-config.yaml`)."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from flambeau.config.yaml_file import read_options as read_options

logger = logging.getLogger(__name__)

T = TypeVar("T")
DEFAULT_BATCH_DELAY_MS = 100  # what TorchServe calls the default; here a bound that nobody waits for


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
    concurrency: int = 64  # jobs one worker with an `async def` handler holds at a time
    memory_limit_mb: int | None = None
    device_type: Literal["cpu", "gpu"] | None = None
    device_ids: tuple[int, ...] = ()
    use_job_ticket: bool = False  # a job is taken only for a worker that is idle
    continuous_batching: bool = False  # jobs join and leave a batch between calls of the handler
    sequence_batching: bool = False  # the jobs of a sequence go to one worker, in order
    sequence_max_idle_s: float = 0
    sequence_timeout_s: float | None = None
    sequence_queue_size: int = 1
    max_sequences: int = 1
    async_communication: bool = False
    parallel_type: Literal["", "pp", "tp", "pptp", "custom"] = ""
    parallel_level: int = 0  # devices, or processes, of one worker
    torchrun: Mapping[str, Any] = field(default_factory=dict)
    use_venv: bool = False
    target_queue_s: float = 0.1  # a worker is added, up to max_workers, when jobs wait longer than this
    idle_s: float = 60  # without a job for this long, workers beyond min_workers retire
    scales_to_zero: bool = False  # then the last one retires too, and the next job brings it back
    envelope: str | None = None  # None: the server's; "": none
    openai: bool = True  # False: OpenAI's API does not know it, whatever it is able to
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_options(self, options: Mapping[str, Any], where: str = "model-config.yaml") -> ModelConfig:
        """These settings, overridden by what a model-config.yaml says; `where` is what warnings call it."""
        read = _Reader(options, where)
        _hint_at_misspelt(options, where)
        changes: dict[str, Any] = {"options": options}
        if pair := _workers(read):
            changes |= {"min_workers": pair[0], "max_workers": pair[1]}
        if size := read.number("batchSize", 0, at_least=1):
            changes["batch_size"] = int(size)
        if (delay := read.number("maxBatchDelay", -1)) >= 0:
            changes["batch_delay_s"] = delay / 1000
        for key, name in _MILLISECONDS.items():
            if milliseconds := read.number(key, 0):
                changes[name] = milliseconds / 1000
        for key, name in _SWITCHES.items():
            if key in options:
                changes[name] = read.get(key, bool, False)
        changes |= _parallelism(read)
        device = read.get("deviceType", str, "")
        if device in ("cpu", "gpu"):
            changes["device_type"] = device
        elif device:
            read.warn("deviceType is %r; it may be cpu or gpu, so it is ignored", device)
        if envelope := read.get("envelope", str, ""):
            changes["envelope"] = "" if envelope == "none" else envelope
        for key, name in _PLAIN.items():
            if value := read.number(key, 0):
                changes[name] = value if name.endswith("_s") else int(value)
        ids = read.get("deviceIds", list, [])
        if ids and all(type(i) is int and i >= 0 for i in ids):
            changes["device_ids"] = tuple(ids)
        elif ids:
            read.warn("deviceIds must be a list of device numbers; this one is ignored")
        return replace(self, **changes)

    def with_settings(self, said: Mapping[str, Any], *, workers: bool) -> ModelConfig:
        """These settings, overridden by what `models` in config.properties says; there, 0 and less mean unset."""
        read = _Reader(said, "models in config.properties")
        given = {key: value for key in _SETTINGS if key in said and (value := read.number(key, 0, at_least=None)) > 0}
        config = replace(
            self.with_options({k: v for k, v in given.items() if "Workers" not in k}), options=self.options
        )
        if not workers or not {"minWorkers", "maxWorkers"} & given.keys():
            return config
        low, high = int(given.get("minWorkers", 0)), int(given.get("maxWorkers", self.max_workers))
        low = low or min(self.min_workers, high)
        return replace(config, min_workers=low, max_workers=max(low, high))

    @property
    def schedule(self) -> Literal["batches", "continuous", "sequences", "async"]:
        """How its workers are given jobs; sequences and continuous batching leave no room for anything else."""
        if self.continuous_batching:
            return "continuous"
        if self.sequence_batching:
            return "sequences"
        return "async" if self.async_communication else "batches"

    @property
    def num_together(self) -> int:
        """How many jobs one call of the handler gets at most."""
        if self.schedule == "async":
            return 1
        return self.batch_size * (2 if self.continuous_batching and self.sequence_batching else 1)

    @property
    def batch_delay_ms(self) -> int:
        """The longest a job may wait for company, as `describe` reports it."""
        return DEFAULT_BATCH_DELAY_MS if self.batch_delay_s is None else round(self.batch_delay_s * 1000)


_SETTINGS = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout")
_PLAIN = {
    "responseTimeout": "response_timeout_s",
    "startupTimeout": "startup_timeout_s",
    "maxRetryTimeoutInSec": "max_retry_s",
    "jobQueueSize": "queue_size",
    "maxConcurrency": "concurrency",
    "workerMemoryLimitMb": "memory_limit_mb",
    "maxSequenceJobQueueSize": "sequence_queue_size",
    "maxNumSequence": "max_sequences",
    "idleTimeoutInSec": "idle_s",
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
}
_PARALLEL_TYPES = ("pp", "tp", "pptp", "custom")
_OTHERS = ("deviceType", "deviceIds", "parallelType", "parallelLevel", "torchrun", "envelope")
MODEL_KEYS = (*dict.fromkeys((*_SETTINGS, *_PLAIN, *_MILLISECONDS, *_SWITCHES, *_OTHERS)),)
LARGEST = 1 << 31  # TorchServe's integers end there too
LIKENESS = 0.9  # how like a known key another must be, to be taken for a misspelling of it


def _hint_at_misspelt(options: Mapping[str, Any], where: str) -> None:
    """Name near misses of known keys. All other keys are the handler's own, and nobody's business."""
    plain = {_plain(key): key for key in MODEL_KEYS}
    for key in options:
        if isinstance(key, str) and key not in MODEL_KEYS:
            near = difflib.get_close_matches(_plain(key), plain, 1, cutoff=LIKENESS)
            if near and plain[near[0]] not in options:
                logger.warning(
                    "%s: %s is left to the handler; did you mean %s, which the server reads?",
                    where,
                    key,
                    plain[near[0]],
                )


def _plain(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "")


def _workers(read: _Reader) -> tuple[int, int] | None:
    """How many workers; TorchServe takes the two numbers only as a valid pair, and we say when it is none."""
    low, high = read.number("minWorkers", 0, at_least=None), read.number("maxWorkers", 0)
    if "minWorkers" in read.options and low < 1:
        read.warn("minWorkers is %r and counts as 1; scaleToZero: true lets the last worker go", low)
        low = 1
    if low > 0 and high >= low:
        return int(low), int(high)
    if "minWorkers" in read.options and "maxWorkers" in read.options:
        read.warn("maxWorkers is less than minWorkers, so both are ignored")
    elif "minWorkers" in read.options or "maxWorkers" in read.options:
        there, missing = ("minWorkers", "maxWorkers") if "minWorkers" in read.options else ("maxWorkers", "minWorkers")
        read.warn("%s is ignored without %s; give both", there, missing)
    return None


def _parallelism(read: _Reader) -> dict[str, Any]:
    """How many processes or devices make one worker; `parallelLevel` counts only with a `parallelType`."""
    kind = read.get("parallelType", str, "")
    if kind not in ("", *_PARALLEL_TYPES):
        read.warn("parallelType is %r; it may be %s, so it is ignored", kind, ", ".join(_PARALLEL_TYPES))
        kind = ""
    torchrun = read.get("torchrun", dict, {})
    level = _Reader(torchrun, read.where).number("nproc-per-node", 1) if torchrun else read.number("parallelLevel", 0)
    ids = read.options.get("deviceIds")
    if kind == "tp" and not level and isinstance(ids, list):
        level = len(ids)  # a rank for each device that is named
    return {"parallel_type": kind, "parallel_level": int(level) if kind else 0, "torchrun": torchrun}


class _Reader:
    """Takes typed values out of a YAML mapping; a wrong type is a warning, as it was in TorchServe."""

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
    """A value in few words, whatever it holds."""
    is_plain = value is None or isinstance(value, (str, int, float))
    return repr(value)[:80] if is_plain else f"a {type(value).__name__}"
