"""Keys: token authorization of the APIs. The keys are kept in a file; a change of the file counts at once.

HostCheck: without keys, refuses what web pages of other sites send through a browser on this machine or in its network.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from flambeau.config.server import KEY_VARIABLES as VARIABLES
from flambeau.config.server import KeysConfig
from flambeau.errors import ConfigError, ForeignRequest, InvalidKey
from flambeau.frontend.key_file import (
    API,
    KINDS,
    MIN_CHARACTERS,
    ApiKey,
    Kind,
    kind_of,
    limits_document,
    locked,
    new_key,
    read_keys,
    to_document,
    to_instant,
    write_private,
)
from flambeau.serving.tenants import Tenant, Tenants

logger = logging.getLogger(__name__)

REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"
NOT_RENEWED = "Token Authentication failed. Token either incorrect, expired, or not provided correctly"
HOW_TO_RENEW = (
    "A key is renewed with /token?type=inference or ?type=management, and the API key as Authorization: Bearer KEY "
    "(`flambeau keys show API`). On the server's machine, `flambeau keys new` needs no key."
)
LOOK_S = 1.0  # between two looks at the key file
RENEW_LOCK_S = 1.0  # a renewal waits on the event loop
# No public domain name ends so, or has a single label: no web page of another site can have such an address.
LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".svc")
MAX_KNOWN_HOSTS = 256
MAX_SHOWN = 100  # characters of a client's header in an error message
_BEARER = re.compile(r"Bearer\s+(\S+)\s*", re.ASCII)


class Keys:
    """The keys of one server. They survive a restart if they are supplied, or if their file is kept."""

    def __init__(
        self, config: KeysConfig, environment: Mapping[str, str] = os.environ, now: Callable[[], float] = time.time
    ) -> None:
        self._expiry_s = config.expiry_s
        self._now = now
        self.tenants = Tenants()
        self._supplied = supplied_keys(environment)
        self._next_look = now() + LOOK_S
        if config.file.is_symlink():
            self._read_mounted(config.file)
            return
        with ExitStack() as lock:
            try:
                lock.enter_context(locked(config.file))
            except OSError:
                pass  # it cannot be written either, which `_save` reports
            known = {**self._unexpired(read_keys(config.file)), **self._supplied}
            own = {kind: known.get(kind) or self._new_key(kind) for kind in KINDS}
            self._use({**own, **known})
            self.file = self._save(config.file, is_needed=len(self._supplied) < len(own))
            self._stamp = stamp_of(self.file)

    def _read_mounted(self, file: Path) -> None:
        """Use the keys behind a link, as a mounted secret is. Nothing is written, so none can be added or renewed."""
        stamp = stamp_of(file)
        known = {**self._unexpired(read_keys(file)), **self._supplied}
        if lacking := [kind for kind in get_args(Kind) if kind not in known]:
            raise ConfigError(
                f"{file} is a link, so no keys are written there, and it has no valid {' and no '.join(lacking)} key; "
                "put them into the file behind it, which only its owner may change, or name another key file"
            )
        self._use({API: self._new_key(API), **known})
        self.file, self._stamp = file, stamp

    def check(self, kind: Kind, authorization: str | None) -> Tenant:
        """Whose key the value of an `authorization` header has; raises InvalidKey if it is no key of this API."""
        now = self._now()
        if now >= self._next_look:
            self._look(now)
        given = bearer(authorization)
        tenant = self._tenant(kind, given, now)
        if tenant is None and given:
            self._look(now)  # it may have been made just now
            tenant = self._tenant(kind, given, now)
        if tenant is not None:
            return tenant
        raise InvalidKey(REFUSED, plain=self._explain(kind, authorization, given, now))

    def _tenant(self, kind: Kind, given: str, now: float) -> Tenant | None:
        for name, key in self._by_kind[kind]:
            if key.matches(given, now):
                return self.tenants[name]
        return None

    def tenant_of(self, name: str) -> Tenant | None:
        """The tenant of a key by its name; None if it was revoked or has expired."""
        now = self._now()
        if now >= self._next_look:
            self._look(now)
        key = self._keys.get(name)
        return None if key is None or key.has_expired(now) else self.tenants[name]

    def renew(self, kind: str | None, authorization: str | None) -> None:
        """Replace a key for a caller with the API key; the old one is invalid from now on."""
        self._look(self._now())
        given = bearer(authorization)
        may_renew = any(key.matches(given, self._now()) for _, key in self._by_kind[API])
        if kind is None or kind not in get_args(Kind) or not may_renew:
            raise InvalidKey(NOT_RENEWED, plain=HOW_TO_RENEW)
        with ExitStack() as lock:
            if self.file is not None:
                lock.enter_context(locked(self.file, RENEW_LOCK_S))
                self._look(self._now())  # what another process has added or revoked meanwhile
            keys = {**self._keys, kind: self._new_key(kind)}
            if self.file is not None:
                # first: a key that nobody can read would lock all callers out
                write_private(self.file, to_document(keys))
                self._stamp = stamp_of(self.file)
        self._use(keys)
        self._supplied.pop(kind, None)
        logger.info("the %s key was renewed", kind)

    def describe(self) -> list[dict[str, Any]]:
        """The keys without their secrets, and what was used with them since the server has started."""
        self._look(self._now())
        return [describe_key(name, key, self.tenants[name]) for name, key in self._keys.items()]

    @property
    def supplied(self) -> frozenset[str]:
        """The names of the keys that come from environment variables."""
        return frozenset(self._supplied)

    def _use(self, keys: dict[str, ApiKey]) -> None:
        self._keys = keys
        self._by_kind = {
            kind: [(name, key) for name, key in keys.items() if kind_of(name, key) == kind] for kind in KINDS
        }
        self.tenants.update({name: key.limits for name, key in keys.items()}, time.monotonic())

    def _look(self, now: float) -> None:
        """Read the file again if it has changed: a new key is accepted, and a revoked one is not."""
        self._next_look = now + LOOK_S
        stamp = stamp_of(self.file)
        if self.file is None or stamp is None or stamp == self._stamp:  # a file that is gone revokes nothing
            return
        self._stamp = stamp
        if found := read_keys(self.file):
            self._use({**found, **self._supplied})
            logger.info("the keys were read again from %s", self.file)
        else:
            logger.warning("%s has no valid keys; those that were in it stay valid", self.file)

    def _explain(self, kind: Kind, authorization: str | None, given: str, now: float) -> str:
        """Why a caller is refused, and the remedy."""
        place = f"it is in {self.file.name} on the server" if self.file else f"it is {VARIABLES[kind]} of the server"
        remedy = (
            f"Send the {kind} key as Authorization: Bearer KEY; {place}, and `flambeau keys show {kind}` prints it."
        )
        if not authorization:
            return f"This call needs a key. {remedy}"
        if not given:
            return f"The Authorization header is not Bearer KEY. {remedy}"
        for name, key in self._keys.items():
            if key.is_same(given) and key.has_expired(now):
                made = f"`flambeau keys new {name}` makes another"
                return f"The key {name} has expired, at {to_instant(key.expires_at or 0)}; {made}."
            if key.is_same(given):
                return f"The key is for the {kind_of(name, key)} API. {remedy}"
        return f"The key is wrong, or was revoked. {remedy}"

    def _new_key(self, kind: str) -> ApiKey:
        return new_key(None if kind == API or self._expiry_s is None else self._now() + self._expiry_s)

    def _unexpired(self, found: Mapping[str, ApiKey]) -> dict[str, ApiKey]:
        """The unexpired keys of an earlier run; the expiry of the server's own is limited by the current setting."""
        return {name: self._shortened(name, key) for name, key in found.items() if not key.has_expired(self._now())}

    def _shortened(self, name: str, key: ApiKey) -> ApiKey:
        if name == API or name not in KINDS or self._expiry_s is None:
            return key
        latest = self._now() + self._expiry_s
        return replace(key, expires_at=latest if key.expires_at is None else min(key.expires_at, latest))

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


def describe_key(name: str, key: ApiKey, tenant: Tenant) -> dict[str, Any]:
    return {
        "name": name,
        "api": kind_of(name, key),
        "expires": to_instant(key.expires_at) if key.expires_at else None,
        "limits": limits_document(key.limits),
        "running": tenant.num_running,
        "requests": tenant.num_requests,
        "rejected": dict(tenant.num_rejected),
        "prompt_tokens": tenant.num_prompt_tokens,
        "output_tokens": tenant.num_output_tokens,
    }


def stamp_of(file: Path | None) -> tuple[int, int] | None:
    """What changes when a file is replaced or written; None if there is no such file."""
    try:
        status = os.stat(file) if file is not None else None
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns) if status else None


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
        self.known: set[str] = set()  # accepted values of Host, so that each is examined once

    def check(self, host: str | None, origin: str | None) -> None:
        """Raise ForeignRequest for values that only a browser with a foreign page sends; programs may omit both."""
        if host and host not in self.known:
            if not self._is_own(name_of(host)):
                raise ForeignRequest(
                    f"The Host {shown(host)} is not a known name of this server. Use its address or localhost, add the "
                    "name to allowed_hosts, or turn token authorization on."
                )
            if len(self.known) < MAX_KNOWN_HOSTS:
                self.known.add(host)
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
