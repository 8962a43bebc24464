"""Keys: token authorization of the APIs. Three keys, of which two expire, are kept in a file.

HostCheck: without keys, refuses what web pages of other sites send through a browser on this machine or in its network.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from flambeau.config.server import KEY_VARIABLES as VARIABLES
from flambeau.config.server import KeysConfig
from flambeau.errors import ConfigError, ForeignRequest, InvalidKey

logger = logging.getLogger(__name__)

Kind = Literal["management", "inference"]  # the API that a key is for; the third key renews these two
API = "API"
REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
NOT_RENEWED = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"
MIN_CHARACTERS = 32
MAX_FILE_BYTES = 64 * 1024
# No public domain name ends so, or has a single label: no web page of another site can have such an address.
LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".svc")
MAX_KNOWN_HOSTS = 256
MAX_SHOWN = 100  # characters of a client's header in an error message
_EXPIRY = "expiration time"  # the name in the file
_BEARER = re.compile(r"Bearer\s+(\S+)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A secret and its expiry; None: it never expires."""

    secret: str
    expires_at: float | None = None

    def matches(self, given: str, now: float) -> bool:
        """Whether a given secret is this one and has not expired; takes constant time."""
        is_same = hmac.compare_digest(self.secret.encode(), given.encode())
        return is_same and (self.expires_at is None or now < self.expires_at)


class Keys:
    """The keys of one server. They survive a restart if they are supplied, or if their file is kept."""

    def __init__(
        self, config: KeysConfig, environment: Mapping[str, str] = os.environ, now: Callable[[], float] = time.time
    ) -> None:
        self._expiry_s = config.expiry_s
        self._now = now
        supplied = supplied_keys(environment)
        known = {**self._unexpired(read_keys(config.file)), **supplied}
        self._keys: dict[str, ApiKey] = {
            kind: known.get(kind) or self._new_key(kind) for kind in (*get_args(Kind), API)
        }
        self.file = self._save(config.file, is_needed=len(supplied) < len(self._keys))

    def check(self, kind: Kind, authorization: str | None) -> None:
        """Raise InvalidKey unless the value of an `authorization` header has the key of this API."""
        if not self._keys[kind].matches(bearer(authorization), self._now()):
            raise InvalidKey(REFUSED)

    def renew(self, kind: str | None, authorization: str | None) -> None:
        """Replace a key for a caller with the API key; the old one is invalid from now on."""
        if (
            kind is None
            or kind not in get_args(Kind)
            or not self._keys[API].matches(bearer(authorization), self._now())
        ):
            raise InvalidKey(NOT_RENEWED)
        keys = {**self._keys, kind: self._new_key(kind)}
        if self.file is not None:
            write_private(self.file, to_document(keys))  # first: a key that nobody can read would lock all callers out
        self._keys = keys
        logger.info("the %s key was renewed", kind)

    def _new_key(self, kind: str) -> ApiKey:
        return ApiKey(secrets.token_urlsafe(32), None if kind == API else self._now() + self._expiry_s)

    def _unexpired(self, found: Mapping[str, ApiKey]) -> dict[str, ApiKey]:
        """The unexpired keys of an earlier run; their expiry is limited by the current setting."""
        latest = self._now() + self._expiry_s
        return {
            kind: key if key.expires_at is None else ApiKey(key.secret, min(key.expires_at, latest))
            for kind, key in found.items()
            if key.expires_at is None or key.expires_at > self._now()
        }

    def _save(self, wanted: Path, *, is_needed: bool) -> Path | None:
        """Write the file as configured, else to a temporary folder; None if neither is possible nor needed."""
        try:
            write_private(wanted, to_document(self._keys))
            return wanted
        except OSError as error:
            reason = error.strerror
        try:
            spare = Path(tempfile.mkdtemp(prefix="flambeau-keys-")) / wanted.name
            write_private(spare, to_document(self._keys))
        except OSError:
            if is_needed:
                names = ", ".join(VARIABLES.values())
                raise ConfigError(
                    f"the keys cannot be written to {wanted} ({reason}), nor to a temporary folder; name another file, "
                    f"supply the keys as {names}, or turn token authorization off"
                ) from None
            return None
        logger.warning("%s cannot be written (%s); the keys are in %s", wanted, reason, spare)
        return spare


def bearer(authorization: str | None) -> str:
    """The key in `Bearer <key>`; empty for anything else."""
    match = _BEARER.fullmatch(authorization or "")
    return match.group(1) if match else ""


def supplied_keys(environment: Mapping[str, str]) -> dict[str, ApiKey]:
    """The keys in environment variables; they do not expire."""
    found = {kind: environment[name] for kind, name in VARIABLES.items() if environment.get(name)}
    for kind, secret in found.items():
        if len(secret) < MIN_CHARACTERS or not re.fullmatch(r"[!-~]+", secret):
            raise ConfigError(
                f"{VARIABLES[kind]} must be at least {MIN_CHARACTERS} printable characters without blanks"
            )
    if len({*found.values()}) < len(found):
        raise ConfigError(f"{' and '.join(VARIABLES[kind] for kind in found)} must differ from each other")
    return {kind: ApiKey(secret) for kind, secret in found.items()}


def read_keys(file: Path) -> dict[str, ApiKey]:
    """The keys in the file; none if other users may know them."""
    try:
        with file.open("rb") as stream:
            problem = exposure(os.fstat(stream.fileno()))
            document = json.loads(stream.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(document, dict):
        return {}
    found = {kind: read_key(document.get(kind)) for kind in VARIABLES}
    keys = {kind: key for kind, key in found.items() if key is not None}
    if len({key.secret for key in keys.values()}) < len(keys):
        problem = "some of its keys are equal"
    if problem and keys:
        logger.warning("the keys in %s are replaced by new ones: %s", file, problem)
        return {}
    return keys


def exposure(status: os.stat_result) -> str:
    """Why other users may know the keys in a file; empty if they may not."""
    if status.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user"
    if status.st_mode & 0o077:
        return f"others may read or change it (its mode is {status.st_mode & 0o777:04o}, and should be 0600)"
    return ""


def to_document(keys: Mapping[str, ApiKey]) -> dict[str, dict[str, str]]:
    """Keys in the format of the file."""
    return {
        kind: {"key": key.secret, **({_EXPIRY: to_instant(key.expires_at)} if key.expires_at else {})}
        for kind, key in keys.items()
    }


def read_key(entry: Any) -> ApiKey | None:
    """One entry of a key file; None if it is invalid or too short."""
    if not isinstance(entry, dict):
        return None
    secret, instant = entry.get("key"), entry.get(_EXPIRY)
    if not isinstance(secret, str) or len(secret) < MIN_CHARACTERS:
        return None
    try:
        return ApiKey(secret, None if instant is None else datetime.fromisoformat(instant).timestamp())
    except (TypeError, ValueError):
        return None


def to_instant(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")


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


# ---- without keys ----


class HostCheck:
    """Refuses requests of foreign web pages, by their Origin or by a Host name that was pointed at this server."""

    def __init__(
        self, allowed_hosts: Iterable[str], cors: Iterable[tuple[str, str]] = (), hostname: str | None = None
    ) -> None:
        own = socket.gethostname() if hostname is None else hostname
        self._hosts = frozenset(name.lower().rstrip(".") for name in (*allowed_hosts, own) if name)
        origins = [value for name, value in cors if name.lower() == "access-control-allow-origin"]
        self._origins = frozenset(one.strip().lower() for value in origins for one in value.split(","))
        self._known: set[str] = set()  # accepted values of Host, so that each is examined once

    def check(self, host: str | None, origin: str | None) -> None:
        """Raise ForeignRequest for values that only a browser with a foreign page sends; programs may omit both."""
        if host and host not in self._known:
            if not self._is_own(name_of(host)):
                raise ForeignRequest(
                    f"The Host {shown(host)} is not a known name of this server. Use its address or localhost, add the "
                    "name to allowed_hosts, or turn token authorization on."
                )
            if len(self._known) < MAX_KNOWN_HOSTS:
                self._known.add(host)
        if origin is not None and not self._is_allowed(origin.lower(), name_of(host or "")):
            raise ForeignRequest(
                f"Web pages of {shown(origin)} may not use this server. Name it in cors_allowed_origin, or turn token "
                "authorization on."
            )

    def _is_own(self, name: str) -> bool:
        if is_address(name) or "." not in name or name.endswith(LOCAL_SUFFIXES):
            return True
        return self._is_listed(name)

    def _is_listed(self, name: str) -> bool:
        if name in self._hosts or "*" in self._hosts:
            return True
        return any(pattern[0] == "*" and name.endswith(pattern[1:]) for pattern in self._hosts)

    def _is_allowed(self, origin: str, own: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        name = name_of(origin.partition("://")[2])
        return bool(name) and (name == own or (is_loopback(name) and is_loopback(own)))


def name_of(host: str) -> str:
    """The host in `host:port`, in lower case, without brackets and a final dot."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    return is_address(name) and ipaddress.ip_address(name).is_loopback


def shown(value: str) -> str:
    return repr(value[:MAX_SHOWN])
