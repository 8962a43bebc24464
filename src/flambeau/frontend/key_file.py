"""The file with the keys of a server: the three keys that each server has, and named ones that an operator adds."""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from flambeau.errors import ConfigError
from flambeau.serving.job import PRIORITIES
from flambeau.serving.tenants import NO_LIMITS, KeyLimits

logger = logging.getLogger(__name__)

Kind = Literal["management", "inference"]  # the API that a key is for; the third key renews these two
API = "API"
KINDS = (*get_args(Kind), API)
MIN_CHARACTERS = 32
MAX_FILE_BYTES = 1 << 20
LOCK_S, LOCK_POLL_S = 5.0, 0.01  # a change takes milliseconds
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
NOT_REGULAR = "it is not a regular file"
_EXPIRY = "expiration time"  # the name in the file


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A secret and its expiry; None: it is valid until it is revoked."""

    secret: str
    expires_at: float | None = None
    kind: str = ""  # of a named key; the three others are named by their kind
    limits: KeyLimits = NO_LIMITS

    def is_same(self, given: str) -> bool:
        """Whether a given secret is this one; takes constant time."""
        return hmac.compare_digest(self.secret.encode(), given.encode())

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at

    def matches(self, given: str, now: float) -> bool:
        """Whether a given secret is this one and has not expired."""
        return self.is_same(given) and not self.has_expired(now)


def new_key(expires_at: float | None = None, kind: str = "", limits: KeyLimits = NO_LIMITS) -> ApiKey:
    return ApiKey(secrets.token_urlsafe(32), expires_at, kind, limits)


def kind_of(name: str, key: ApiKey) -> str:
    return key.kind or name


def read_keys(file: Path) -> dict[str, ApiKey]:
    """The keys in the file by name; none if other users may know them."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as stream:
            problem = exposure(file.lstat(), os.fstat(descriptor))
            document = json.loads(b"" if problem == NOT_REGULAR else stream.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    found = {name: read_key(name, entry) for name, entry in document.items()}
    keys = {name: key for name, key in found.items() if key is not None}
    if len({key.secret for key in keys.values()}) < len(keys):
        problem = "some of its keys are equal"
    if problem and keys:
        logger.warning("the keys in %s are not used: %s", file, problem)
        return {}
    return keys


def exposure(own: os.stat_result, status: os.stat_result) -> str:
    """Why other users may know or change the keys in a file; empty if they may not. `own` is of the link, if it is one.

    A link is what a secret of a cluster is mounted as. Who mounts it decides who may read it; others may not change it.
    """
    if not stat.S_ISREG(status.st_mode):
        return NOT_REGULAR
    if not {own.st_uid, status.st_uid} <= {os.geteuid(), 0}:
        return "it belongs to another user"
    if stat.S_ISLNK(own.st_mode):
        is_changeable = status.st_mode & 0o022
        return f"others may change it (its mode is {status.st_mode & 0o777:04o})" if is_changeable else ""
    if status.st_mode & 0o077:
        return f"others may read or change it (its mode is {status.st_mode & 0o777:04o}, and should be 0600)"
    return ""


def to_document(keys: Mapping[str, ApiKey]) -> dict[str, dict[str, Any]]:
    """Keys in the format of the file."""
    return {name: to_entry(key) for name, key in keys.items()}


def to_entry(key: ApiKey) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": key.secret}
    if limits := limits_document(key.limits):
        entry["limits"] = limits
    if key.kind:
        entry["api"] = key.kind
    if key.expires_at:
        entry[_EXPIRY] = to_instant(key.expires_at)
    return entry


def read_key(name: str, entry: Any) -> ApiKey | None:
    """One entry of a key file; None if it is invalid or too short."""
    if not isinstance(entry, dict):
        return None
    secret, instant = entry.get("key"), entry.get(_EXPIRY)
    kind = "" if name in KINDS else str(entry.get("api"))
    if not isinstance(secret, str) or len(secret) < MIN_CHARACTERS or not (name in KINDS or kind in get_args(Kind)):
        return None
    try:
        expires_at = None if instant is None else datetime.fromisoformat(instant).timestamp()
    except (TypeError, ValueError):
        return None
    try:
        return ApiKey(secret, expires_at, kind, read_limits(entry.get("limits", {})))
    except ConfigError as error:  # a key without the limits that it should have is not accepted
        logger.warning("the key %s is not used: %s", name, error)
        return None


LIMIT_NUMBERS = ("requests_per_minute", "tokens_per_minute", "max_concurrent")


def read_limits(document: Any) -> KeyLimits:
    """The limits of a key in the file; raises ConfigError for one that is unknown or invalid."""
    if not isinstance(document, dict):
        raise ConfigError("its limits are no object")
    given: dict[str, Any] = dict(document)
    for name in LIMIT_NUMBERS:
        value = given.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} must be a whole number from 1, not {value!r}")
    models = given.get("models", [])
    if not isinstance(models, list) or not all(isinstance(model, str) and model for model in models):
        raise ConfigError("models must be a list of names")
    priority, weight = given.get("priority"), given.get("weight", 1.0)
    if priority not in (None, *PRIORITIES):
        raise ConfigError(f"priority must be {', '.join(PRIORITIES)}, not {priority!r}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ConfigError(f"weight must be a number from {MIN_WEIGHT} to {MAX_WEIGHT}, not {weight!r}")
    if unknown := [*given.keys() - {*LIMIT_NUMBERS, "models", "priority", "weight"}]:
        raise ConfigError(f"there is no limit {unknown[0]!r}; there are {', '.join(LIMIT_NUMBERS)}, models, priority")
    return KeyLimits(
        **{name: given.get(name) for name in LIMIT_NUMBERS},
        models=tuple(models),
        priority=None if priority is None else PRIORITIES.index(priority),
        weight=float(weight),
    )


def limits_document(limits: KeyLimits) -> dict[str, Any]:
    """Limits in the format of the file; only those that are set."""
    document: dict[str, Any] = {name: getattr(limits, name) for name in LIMIT_NUMBERS}
    document["models"] = [*limits.models] or None
    document["priority"] = None if limits.priority is None else PRIORITIES[limits.priority]
    document["weight"] = None if limits.weight == 1.0 else limits.weight
    return {name: value for name, value in document.items() if value is not None}


def to_instant(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")


def check_replaceable(file: Path) -> None:
    """Raise ConfigError for an existing path that is not a key file: it would be lost, as keys are written."""
    try:
        status = file.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise ConfigError(f"{file} is a link: keys are read through it, but not written; change the file behind it")
        if not stat.S_ISREG(status.st_mode):
            problem = "is not a regular file"
        elif is_key_document(file.read_bytes() if status.st_size <= MAX_FILE_BYTES else b"too large"):
            return
        else:
            problem = "holds something other than keys"
    except OSError:
        return  # it is missing, or cannot be read or written; whoever writes it says so
    raise ConfigError(
        f"{file} {problem}, and would be overwritten with keys; name another key file, or move this one away"
    )


def is_key_document(data: bytes) -> bool:
    """Whether the content of a file is empty, or has the form of keys, be they usable or not."""
    if not data.strip():
        return True
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and all(
        isinstance(entry, dict) and isinstance(entry.get("key"), str) for entry in document.values()
    )


@contextmanager
def locked(file: Path, wait_s: float = LOCK_S) -> Iterator[None]:
    """Keep other processes from changing a key file; without one, an empty file is created.

    Raises ConfigError if the path is not a key file or stays locked, and OSError if it cannot be opened.
    """
    deadline = time.monotonic() + wait_s
    while True:
        check_replaceable(file)
        descriptor = os.open(file, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(descriptor) and is_at(file, descriptor):
                yield
                return
        finally:
            os.close(descriptor)
        if time.monotonic() >= deadline:
            raise ConfigError(f"{file} stays locked by another process; end that process, or name another key file")
        time.sleep(LOCK_POLL_S)


def try_lock(descriptor: int) -> bool:
    """Whether the lock was taken; true on file systems without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_at(file: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at this path: whoever had the lock before has replaced it."""
    try:
        return os.path.samestat(file.lstat(), os.stat(descriptor))
    except FileNotFoundError:
        return False


def write_private(file: Path, document: Mapping[str, Any]) -> None:
    """Write JSON that only this user may read, atomically."""
    fresh = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(document, indent=2) + "\n")
            stream.flush()
            os.fsync(descriptor)
        os.replace(fresh, file)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
